"""Layers divided over ranks in place of shards: every rank trains parts of all layers.

The model and the optimizer are made, and resumed, whole; they are divided before the first step. A
checkpoint has each part from the rank that trains it, as a box of the whole tensor. So a run with
divided layers can be resumed without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from braid.checkpoint import Slice, Snapshot
from braid.comm import Group
from braid.data import Windows
from braid.layout import Mesh
from braid.tensor_parallel import clip_grad_norm_, parallelize, slicing_of, undivide
from braid.train.config import TrainConfig
from braid.train.gpt import GPT
from braid.train.shards import Round

__all__ = ["TensorShards"]


class TensorShards:
    """Trains a GPT whose layers are divided; see `Shards`.

    Args:
        model: The model, equal on all ranks.
        optimizer: Its optimizer; states are divided with their parameters.
        windows: Samples to train on.
        group: All ranks that train.
        config: Mesh of divided layers (tp) and replicas (dp).
    """

    def __init__(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        windows: Windows,
        group: Group,
        config: TrainConfig,
    ) -> None:
        place = Mesh.parse(config.mesh).coordinates(group.rank)
        layers, replicas = group.split(place.get("dp", 0)), group.split(place["tp"])
        assert layers is not None
        assert replicas is not None
        self._model = model
        self._optimizer = optimizer
        self._windows = windows
        self._group = group
        self._layers = layers
        self._replicas = replicas
        self._is_divided = False

    def backward(self, batch: Sequence[int], *, stop: bool) -> Round:
        """See `Shards`."""
        self._divide()
        events = self._group.context.events
        with events.span("data"):
            inputs, targets = self._windows.batch(self._share(batch))
        with events.span("forward"):
            loss: torch.Tensor = self._model(inputs, targets)
        with events.span("backward"):
            loss.backward()  # type: ignore[no-untyped-call]  # torch's signature is untyped
        if self._replicas.size > 1:
            with self._replicas.coalesce() as block:
                for param in self._model.parameters():
                    assert param.grad is not None, "all parameters are used"
                    block.all_reduce(param.grad, op="avg")
            block.work.wait()
        mine = torch.tensor([[loss.item(), float(stop)]], dtype=torch.float64)
        losses, stops = self._group.all_gather(mine).t().tolist()
        return Round(tuple(losses), any(stops))

    def evaluate(self, windows: Windows, indices: Sequence[int]) -> float:
        """See `Shards`."""
        self._divide()
        with torch.no_grad():
            loss = self._model(*windows.batch(self._share(indices))).double()
        return float(self._replicas.all_reduce(loss, op="avg"))

    def clip(self, max_norm: float) -> float:
        """See `Shards`."""
        return clip_grad_norm_(self._model, max_norm, self._layers).item()

    def snapshot(self, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        """See `Shards`."""
        return _Boxes(self._model, tensors, self._layers, writes=not self._replicas.rank)

    def share_weights(self) -> None:
        """See `Shards`: all layers become whole again."""
        undivide(self._model, self._layers)

    def _divide(self) -> None:
        """Divide the model and the states of its optimizer, once."""
        if self._is_divided:
            return
        self._is_divided = True
        shapes = {param: param.shape for param in self._model.parameters()}
        parallelize(self._model, self._layers)
        for param, shape in shapes.items():
            slicing = slicing_of(param)
            state = self._optimizer.state.get(param, {})
            for name, value in state.items():
                if slicing is not None and value.shape == shape:
                    state[name] = slicing.part_of(value, self._layers.rank, self._layers.size)

    def _share(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the samples of this rank's replica."""
        count, number = self._replicas.size, self._replicas.rank
        return indices[number * len(indices) // count : (number + 1) * len(indices) // count]


class _Boxes:
    """Parts of this rank as boxes, and whole tensors from the first rank."""

    def __init__(
        self, model: GPT, tensors: Mapping[str, torch.Tensor], group: Group, *, writes: bool
    ) -> None:
        self._params = dict(model.named_parameters())
        self._tensors = tensors
        self._group = group
        self._writes = writes

    def pieces(self) -> Iterable[Slice]:
        """See `Snapshot`."""
        rank, size = self._group.rank, self._group.size
        for name, tensor in self._tensors.items() if self._writes else ():
            param = self._params.get(_param_of(name))
            slicing = None if param is None else slicing_of(param)
            if slicing is not None and param is not None and tensor.shape == param.shape:
                shape = slicing.whole_shape(tensor, size)
                for offset, box in slicing.boxes(tensor.detach(), rank, size):
                    yield Slice(name, shape, offset, box)
            elif not rank:
                yield Slice(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())


def _param_of(name: str) -> str:
    """Return the parameter of `model/NAME` or `optimizer/NAME/STATE`."""
    root, _, rest = name.partition("/")
    return rest if root == "model" else rest.rpartition("/")[0]
