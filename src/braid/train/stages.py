"""The stages of a pipeline in place of shards: every rank trains some layers on the whole batch.

Every rank has the whole model, but trains the parameters of its stages only; a checkpoint has each
parameter from the first rank that trains it. So a run with a pipeline can be resumed without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from braid.checkpoint import Slice, Snapshot
from braid.comm import Group
from braid.data import Windows
from braid.layout import Mesh
from braid.pipeline import Pipeline
from braid.train.config import TrainConfig
from braid.train.gpt import GPT, mean_loss
from braid.train.shards import Round

__all__ = ["PipelineShards"]


class PipelineShards:
    """Trains a GPT as a pipeline; see `Shards`.

    Args:
        model: The model, equal on all ranks.
        windows: Samples to train on.
        group: All ranks that train.
        config: Mesh of pipelines and replicas, schedule, micro-batches and recomputation.
        balance: Number of layers of each stage; as even as possible when None.
    """

    def __init__(
        self,
        model: GPT,
        windows: Windows,
        group: Group,
        config: TrainConfig,
        *,
        balance: Sequence[int] | None = None,
    ) -> None:
        self._model = model
        self._windows = windows
        self._group = group
        place = Mesh.parse(config.mesh).coordinates(group.rank)
        stages, replicas = group.split(place.get("dp", 0)), group.split(place["pp"])
        assert stages is not None
        assert replicas is not None
        self._replicas = replicas
        every = config.recompute
        self._pipeline = Pipeline(
            model.layers(),
            num_microbatches=config.microbatches,
            schedule=config.schedule,
            balance=balance,
            process_group=stages,
            replicas=replicas if replicas.size > 1 else None,
            recompute=int(every) if every.isdecimal() else every,
            seed=config.seed,
        )
        trained = set(self._pipeline.parameters())
        mine = torch.tensor([int(p in trained) for p in model.parameters()])
        holders = group.all_gather(mine).view(group.size, -1)
        names = [name for name, _ in model.named_parameters()]
        # first rank that trains a parameter, by name
        self._owners = dict(zip(names, holders.argmax(0).tolist(), strict=True))

    def backward(self, batch: Sequence[int], *, stop: bool) -> Round:
        """See `Shards`."""
        with self._group.context.events.span("data"):
            inputs, targets = self._windows.batch(self._share(batch))
        loss = self._pipeline.step(inputs, targets, loss=mean_loss)
        stops = self._group.all_gather(torch.tensor([int(stop)]))
        return Round((loss.item(),), bool(stops.any()))

    def evaluate(self, windows: Windows, indices: Sequence[int]) -> float:
        """See `Shards`."""
        own = self._share(indices)
        return self._pipeline.evaluate(*windows.batch(own), loss=mean_loss).item()

    def _share(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the samples of this rank's replica; all of them if there are too few."""
        count, number = self._replicas.size, self._replicas.rank
        if len(indices) < count:
            return indices
        return indices[number * len(indices) // count : (number + 1) * len(indices) // count]

    def clip(self, max_norm: float) -> float:
        """See `Shards`."""
        return self._pipeline.clip_grad_norm_(max_norm).item()

    def snapshot(self, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        """See `Shards`."""
        own = {
            name: tensor
            for name, tensor in tensors.items()
            if self._owners.get(_param_of(name), 0) == self._group.rank
        }
        return _OwnSnapshot(own)

    def share_weights(self) -> None:
        """See `Shards`."""
        for name, param in self._model.named_parameters():
            self._group.broadcast(param.detach(), self._owners[name])


class _OwnSnapshot:
    """Whole tensors that this rank alone writes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def pieces(self) -> Iterable[Slice]:
        """See `Snapshot`."""
        for name, tensor in self._tensors.items():
            yield Slice(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())


def _param_of(name: str) -> str:
    """Return the parameter of `model/NAME` or `optimizer/NAME/STATE`."""
    root, _, rest = name.partition("/")
    return rest if root == "model" else rest.rpartition("/")[0]
