"""Sharding of a rank's stages on a mesh over their replicas.

Replicas of a stage own shards of its optimizer states (1), gradients (2) and parameters (3). A
pipeline runs several backwards per step, so gradients are accumulated unsharded, and are averaged
once at the end.

Experts on different ranks are not sharded further; their gradients come from replicas with the same
experts. Parameters that several layers share are not sharded: they may belong to several stages,
which add their gradients. At stage 3, parameters outside of gathered units are not sharded either.

Source: S. Rajbhandari et al., ZeRO, SC 2020; Megatron-DeepSpeed has stage 1 with pipelines only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from braid.checkpoint import Slice, Snapshot
from braid.checkpoint.snapshot import param_of
from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.expert_parallel import is_of_experts
from braid.parallel.gradients import ParamRecord, ParamTable, fill_missing_gradients
from braid.parallel.sharding import (
    ShardedSnapshot,
    Sharding,
    ShardingOptions,
    attach,
    sharded_numbers,
)
from braid.parallel.sharding.optimizer import refuse_wrong_rules
from braid.parallel.sharding.state import rest_tensors
from braid.parallel.sharding.units import default_units
from braid.parallel.tensor_parallel import Slicing, slicing_of

__all__ = ["ShardedStages"]

GATHERED = 3  # stage with sharded parameters


class ShardedStages:
    """Sharding of a rank's pipeline stages over the replicas of these stages.

    Args:
        model: The whole model.
        layers: List of its layers, used to find shared parameters.
        trained: Parameters of this rank's stages.
        group: Replicas, which own the shards.
        alike: Replicas with the same experts as this rank.
        layer_group: Ranks that share the layers of a stage (axis tp).
        mesh_group: All ranks of the mesh, which raise the same error.
        stage: 1, 2 or 3, see the module docstring.

    Raises:
        ConfigError: The stage is unknown, or a rank has nothing to shard.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        trained: Iterable[nn.Parameter],
        *,
        group: Group,
        alike: Group,
        layer_group: Group,
        mesh_group: Group,
        stage: int,
    ) -> None:
        counts = Counter(p for layer in layers for p in set(layer.parameters()))
        trained_params = set(trained)
        units = [unit for unit in default_units(model) if trained_params & set(unit.parameters())]
        inside = {p for unit in units for p in unit.parameters()}
        self._slicings: dict[str, Slicing | None] = {}
        ignored, self._kept = set(), []
        for name, param in model.named_parameters():
            self._slicings[name] = slicing_of(param)
            is_outside = stage == GATHERED and param not in inside
            is_shared = counts[param] > 1 or is_outside or is_of_experts(param)
            if param not in trained_params or is_shared:
                ignored.add(name)
            if param in trained_params and is_shared:
                self._kept.append((name, param))
        options = ShardingOptions(stage=stage, units=units, ignored=frozenset(ignored))
        has_none = len(ignored) == len(self._slicings)
        without = [r for r, none in enumerate(mesh_group.objects.all_gather(has_none)) if none]
        if without:
            ranks = ", ".join(str(mesh_group.ranks[r]) for r in without)
            msg = (
                f"no parameter of the stages of ranks {ranks} can be sharded: all are shared "
                "between layers"
            )
            if stage == GATHERED:
                msg += " or outside of ModuleLists: use shard=2"
            else:
                msg += ": use shard=0"
            raise ConfigError(msg)
        self._group = group
        self._alike = alike
        self._layer_group = layer_group
        self.sharding = Sharding(model, group, options)
        refuse_wrong_rules(self.sharding)

    def average(self) -> None:
        """Average gradients over replicas."""
        self.sharding.average()
        grads = fill_missing_gradients([param for _, param in self._kept], [self._group])
        for param, grad in grads:
            if is_of_experts(param):  # the sum over all ranks that share them
                grad.div_(self._group.size // self._alike.size)
        for group, of_experts in ((self._group, False), (self._alike, True)):
            with group.coalesce() as block:
                for param, grad in grads:
                    if is_of_experts(param) == of_experts:
                        block.all_reduce(grad, op="avg")
            block.work.wait()

    def grads(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, bool]]:
        """Yield (parameter, local gradient, whether all replicas have the same gradient).

        In a norm, gradients that several replicas have must be counted once.
        """
        for record, owned in self.sharding.owned():
            if owned.grad is not None:
                yield record.param, owned.grad, False
        for _, param in self._kept:
            if param.grad is not None:
                yield param, param.grad, True

    def named_pieces(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the tensors that the optimizer updates on this rank, with their parameter names."""
        for record, owned in self.sharding.owned():
            yield record.name, owned
        yield from self._kept

    def whole_records(self) -> list[ParamRecord]:
        """Return the unsharded parameters; before `average` their gradients are unsharded too."""
        return [*self.sharding.whole_records(), *ParamTable.named(self._kept)]

    def attach(self, optimizer: Optimizer) -> None:
        """Change an optimizer of the whole model to update this rank's shards and whole tensors."""
        known = {id(record.param) for record in self.sharding.table}
        others = [
            [p for p in group["params"] if id(p) not in known] for group in optimizer.param_groups
        ]
        states = {
            p: optimizer.state.pop(p)
            for group_params in others
            for p in group_params
            if p in optimizer.state
        }
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in known]
        attach(self.sharding, optimizer)
        for group, group_params in zip(optimizer.param_groups, others, strict=True):
            group["params"] += group_params
        optimizer.state.update(states)

    def kept_tensors(self, optimizer: Optimizer | None) -> dict[str, torch.Tensor]:
        """Return the unsharded parameters that this rank trains, with their optimizer states."""
        tensors = rest_tensors(self.sharding, optimizer)
        for name, param in self._kept:
            tensors[f"model/{name}"] = param
            state = {} if optimizer is None else optimizer.state.get(param, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer/{name}/{key}"] = value
        return tensors

    def snapshot(self, optimizer: Optimizer | None) -> Snapshot:
        """Return this rank's shards, for a checkpoint, as slices of whole tensors."""
        return _Pieces(self.sharding, optimizer, self._slicings, self._layer_group)

    def numbers(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """Return values of the training that are not tensors; a collective of the replicas."""
        return sharded_numbers(self.sharding, optimizer)


class _Pieces:
    """Shards of sharded layers, as boxes of the whole tensors; see `Snapshot`."""

    def __init__(
        self,
        sharding: Sharding,
        optimizer: Optimizer | None,
        slicings: Mapping[str, Slicing | None],
        group: Group,
    ) -> None:
        self._snapshot = ShardedSnapshot(sharding, optimizer)
        self._sharded = {record.name for record in sharding.table}
        self._slicings = slicings
        self._group = group

    def pieces(self) -> Iterable[Slice]:
        """Return this rank's slices of tensors; see `Snapshot.pieces`."""
        rank, size = self._group.rank, self._group.size
        for piece in self._snapshot.pieces():
            name = param_of(piece.name)
            slicing = self._slicings.get(name)
            if name not in self._sharded:
                continue  # a buffer
            if slicing is not None and len(piece.offset) > slicing.dim:
                yield from _in_whole(piece, slicing, rank, size)
            elif not rank:
                yield piece


def _in_whole(piece: Slice, slicing: Slicing, rank: int, size: int) -> Iterator[Slice]:
    """Yield a box of a shard as boxes of the whole tensor, one for each packed block."""
    dim, length = slicing.dim, piece.global_shape[slicing.dim]
    unit = length // slicing.blocks
    shape = list(piece.global_shape)
    shape[dim] *= size
    begin, end = piece.offset[dim], piece.offset[dim] + piece.tensor.shape[dim]
    for block in range(slicing.blocks):
        low, high = max(begin, block * unit), min(end, (block + 1) * unit)
        if low >= high:
            continue
        offset = list(piece.offset)
        offset[dim] = block * unit * size + rank * unit + low - block * unit
        values = piece.tensor.narrow(dim, low - begin, high - low)
        yield Slice(piece.name, tuple(shape), tuple(offset), values)
