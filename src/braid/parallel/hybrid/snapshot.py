"""Snapshot of a rank of a mesh: each element of each tensor is written by one rank.

stages      the first stage that trains a parameter writes it
layers      each rank writes its shard, as boxes of the whole tensor; rank 0 unsharded tensors
replicas    the first one writes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from braid.checkpoint import Slice
from braid.checkpoint.snapshot import param_of
from braid.comm import Group
from braid.parallel.expert_parallel import is_of_experts
from braid.parallel.tensor_parallel import slicing_of

__all__ = ["HybridSnapshot"]


class HybridSnapshot:
    """Tensors of this rank as slices of whole tensors; see `braid.checkpoint.Snapshot`.

    Args:
        tensors: Tensors by name: `model/NAME`, `optimizer/NAME/STATE` and others.
        params: Parameters by name.
        owners: Number of the stage that writes each parameter, by name; stage 0 writes all other
            tensors.
        group: Ranks that share layers.
        stage: Rank of this process in its pipeline.
        writes: Whether this rank's replica writes the checkpoint; one replica does.
        experts: Ranks that share experts.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        params: Mapping[str, torch.Tensor],
        owners: Mapping[str, int],
        group: Group,
        *,
        stage: int,
        writes: bool,
        experts: Group,
    ) -> None:
        self._tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if writes and owners.get(param_of(name), 0) == stage
        }
        self._params = params
        self._group = group
        self._experts = experts

    def pieces(self) -> Iterable[Slice]:
        """Return this rank's slices of tensors; see `Snapshot.pieces`."""
        rank, size = self._group.rank, self._group.size
        for name, tensor in self._tensors.items():
            param = self._params.get(param_of(name))
            has_shape = param is not None and tensor.shape == param.shape
            if has_shape and param is not None and is_of_experts(param):
                yield from self._experts_of(name, tensor)
                continue
            if self._experts.rank:
                continue  # rank 0 writes tensors that all ranks have
            slicing = None if param is None else slicing_of(param)
            if slicing is not None and param is not None and tensor.shape == param.shape:
                shape = slicing.whole_shape(tensor, size)
                for offset, box in slicing.boxes(tensor.detach(), rank, size):
                    yield Slice(name, shape, offset, box)
            elif not rank:
                yield Slice(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())

    def _experts_of(self, name: str, tensor: torch.Tensor) -> Iterable[Slice]:
        """Yield this rank's experts as a box of the tensor of all experts."""
        if self._group.rank:
            return
        count = tensor.shape[0]
        shape = (count * self._experts.size, *tensor.shape[1:])
        offset = (count * self._experts.rank, *(0,) * (tensor.dim() - 1))
        yield Slice(name, shape, offset, tensor.detach())
