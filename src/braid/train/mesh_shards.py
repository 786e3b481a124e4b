"""Training on a mesh with pipeline, tensor and context parallelism.

The model and the optimizer are built and resumed unsharded; they are sharded before the first step.
A checkpoint has whole tensors, which the ranks write shard by shard. So a run on a mesh can be
resumed on any other mesh, or without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from braid.checkpoint import Snapshot
from braid.comm import Group
from braid.comm.autograd import MATMULS
from braid.parallel.hybrid import HybridParallel
from braid.train.config import TrainConfig
from braid.train.gpt import GPT, mean_loss
from braid.train.shards import StepAgreement
from braid.train.windows import Windows

__all__ = ["MeshShards"]


class MeshShards:
    """Trains a GPT on a mesh; see `Shards`.

    Args:
        model: The model, equal on all ranks.
        optimizer: Optimizer of the model; its states are sharded like the parameters.
        windows: Samples to train on.
        group: All ranks that train.
        config: Mesh, schedule, micro-batches and recomputation.
        balance: Number of layers of each stage; as even as possible when None.
    """

    def __init__(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        windows: Windows,
        group: Group,
        config: TrainConfig,
        *,
        balance: Sequence[int] | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._windows = windows
        self._group = group
        self._config = config
        self._balance = balance
        mesh = config.meshes[0]
        self._count = dict(mesh.axes).get("dp", 1)
        self._number = mesh.coordinates(group.rank).get("dp", 0)
        self._made: HybridParallel | None = None

    def backward(self, batch: Sequence[int], *, stop: bool) -> StepAgreement:
        """Compute the averaged gradients of a batch; see `Shards.backward`."""
        hybrid = self._hybrid()
        with self._group.context.events.span("data"):
            inputs, targets = self._windows.batch(self._share(batch))
        loss = hybrid.step(inputs, targets, loss=mean_loss)
        stops = self._group.all_gather(torch.tensor([int(stop)]))
        return StepAgreement((loss.item(),), bool(stops.any()))

    def evaluate(self, windows: Windows, indices: Sequence[int]) -> float:
        """Compute the mean loss without gradients; see `Shards.evaluate`."""
        hybrid = self._hybrid()
        return hybrid.evaluate(*windows.batch(self._share(indices)), loss=mean_loss).item()

    def clip(self, max_norm: float) -> float:
        """Scale gradients to at most `max_norm`, and return the norm before; see `Shards.clip`."""
        return self._hybrid().clip_grad_norm_(max_norm).item()

    def checkpoint(self, optimizer: torch.optim.Optimizer) -> tuple[Snapshot, dict[str, Any]]:
        """Return the tensors that this rank writes, and other values; see `Shards.checkpoint`."""
        return self._hybrid().checkpoint(optimizer)

    def share_weights(self) -> None:
        """Gather the whole model on every rank; see `Shards.share_weights`."""
        self._hybrid().make_whole()

    def _hybrid(self) -> HybridParallel:
        """Return the model on the mesh, built at the first call, after a possible resume."""
        if self._made is None:
            config, every = self._config, self._config.recompute
            policy = MATMULS if every == "speed" else None
            every = "always" if every == "speed" else every
            is_piped = "pp" in config.meshes[0].axes
            self._made = HybridParallel(
                self._model,
                config.mesh,
                self._group,
                layers=self._model.layers(),
                num_microbatches=config.microbatches if is_piped else 1,
                schedule=config.schedule,
                balance=self._balance,
                recompute=int(every) if every.isdecimal() else every,
                recompute_policy=policy,
                seed=config.seed,
                shard=config.shard,
            )
            self._made.attach(self._optimizer)
        return self._made

    def _share(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the samples of this rank's replica; all samples if there are too few to divide."""
        if len(indices) < self._count:
            return indices
        first, end = (k * len(indices) // self._count for k in (self._number, self._number + 1))
        return indices[first:end]
