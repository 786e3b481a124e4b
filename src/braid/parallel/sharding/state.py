"""Checkpoint state of a sharded training, as boxes of whole tensors.

A rank's piece of a parameter is a range of its elements: a part of a row, whole rows, and another
part of a row. Since they are stored as boxes of the whole tensor, a checkpoint can be loaded by
another number of ranks, at another stage, or without sharding.

    model/NAME               boxes of parameters, in the dtype of the model; buffers, with running
                             statistics averaged over ranks
    optimizer/NAME/exp_avg   boxes of states with the shape of the parameter
    optimizer/NAME/step      other states, from the owner of the parameter's first element
    optimizer/NAME/master    boxes of the optimizer's copy, if it has another dtype
    optimizer_state_dict/... tensors of one element that belong to no parameter, such as a rate
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from braid.checkpoint import (
    Checkpoint,
    Slice,
    restore_training,
    training_numbers,
    training_tensors,
)
from braid.checkpoint.agreed_buffers import agreed_buffers
from braid.checkpoint.snapshot import param_of
from braid.checkpoint.training_state import REST, merged_numbers
from braid.errors import ConfigError
from braid.parallel.sharding.engine import Sharding
from braid.parallel.sharding.flat_shard import FlatShard
from braid.parallel.sharding.partition import boxes_of
from braid.types import TensorSpec

__all__ = ["ShardedSnapshot", "rest_tensors", "restore_sharded", "sharded_numbers"]

MASTER = "master"


class ShardedSnapshot:
    """Tensors of a sharded training that this rank writes; a `Snapshot` for `braid.checkpoint`.

    Create it on all ranks: the constructor is a collective in which ranks agree on buffers.

    Args:
        sharding: The engine.
        optimizer: Optimizer that steps on the pieces; None to leave it out.
    """

    def __init__(self, sharding: Sharding, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._sharding = sharding
        self._optimizer = optimizer
        self._buffers = agreed_buffers(sharding.model, sharding.places.groups)
        self._rest = rest_tensors(sharding, optimizer)

    def pieces(self) -> Iterable[Slice]:
        """Yield the boxes of this rank; only the first replica writes."""
        places = self._sharding.places
        if places.replicas is not None and places.replicas.rank:
            return
        for flat in self._sharding.flats:
            for index in range(len(flat.records)):
                yield from self._of(flat, index)
        if places.group.rank == 0:
            for name, tensor in {**self._sharding.ignored(), **self._buffers}.items():
                shape = tuple(tensor.shape)
                yield Slice(f"model/{name}", shape, (0,) * len(shape), tensor.detach())
            for name, tensor in self._rest.items():
                shape = tuple(tensor.shape)
                yield Slice(name, shape, (0,) * len(shape), tensor.detach())

    def _of(self, flat: FlatShard, index: int) -> Iterator[Slice]:
        record, owned, piece = flat.records[index], flat.owned[index], flat.pieces[index]
        has_first = piece.numel > 0 and piece.begin == 0
        if not flat.shapes[index].numel():
            has_first = self._sharding.places.group.rank == 0
            if has_first:
                shape = tuple(flat.shapes[index])
                empty = torch.empty(shape, dtype=getattr(torch, record.spec.dtype))
                yield Slice(f"model/{record.name}", shape, (0,) * len(shape), empty)
        values = owned.detach()
        dtype = getattr(torch, record.spec.dtype)
        yield from _boxes(flat, index, f"model/{record.name}", values.to(dtype))
        if self._optimizer is None:
            return
        if values.dtype != dtype:
            yield from _boxes(flat, index, f"optimizer/{record.name}/{MASTER}", values)
        for key, state in self._optimizer.state.get(owned, {}).items():
            if not isinstance(state, torch.Tensor):
                continue
            name = f"optimizer/{record.name}/{key}"
            if state.shape == owned.shape and state.dim():
                yield from _boxes(flat, index, name, state.detach())
            elif has_first:
                shape = tuple(state.shape)
                yield Slice(name, shape, (0,) * len(shape), state.detach())


def rest_tensors(
    sharding: Sharding, optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer's state dict that belong to no parameter.

    Raises:
        ConfigError: A tensor has more than one element, so that ranks may have different ones.
    """
    tensors = training_tensors(_Owned(sharding), optimizer)
    rest = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{REST}/")}
    if large := next((name for name, tensor in rest.items() if tensor.numel() > 1), None):
        msg = (
            f"{type(optimizer).__name__} has the tensor {large} of shape "
            f"{list(rest[large].shape)}, which a checkpoint of a sharded model cannot store: ranks "
            "may have different values"
        )
        raise ConfigError(msg)
    return rest


def sharded_numbers(
    sharding: Sharding, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Return values of a sharded training that are not tensors; a collective.

    The values are the same on all ranks.
    """
    numbers = training_numbers(_Owned(sharding), optimizer)
    return merged_numbers(numbers, sharding.places.group)


def restore_sharded(
    checkpoint: Checkpoint, sharding: Sharding, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Load this rank's pieces from a checkpoint of any number of ranks; a collective.

    Args:
        checkpoint: Checkpoint of the same model, sharded or not.
        sharding: The engine.
        optimizer: Optimizer that steps on the pieces; None to not load it.

    Raises:
        CheckpointError: See `restore_training`.

    Cost: each rank reads the bytes of its pieces.
    """
    view = _PiecesOf(checkpoint, sharding)
    restore_training(view, _Owned(sharding), optimizer)
    for flat in sharding.flats if optimizer is not None else ():
        for record, owned, piece in zip(flat.records, flat.owned, flat.pieces, strict=True):
            name = f"optimizer/{record.name}/{MASTER}"
            if piece.numel and name in checkpoint.names():
                with torch.no_grad():
                    owned.copy_(view.read(name))
    sharding.share_step()


class _Owned(nn.Module):
    """View of a model with this rank's pieces as parameters, at any stage."""

    def __init__(self, sharding: Sharding) -> None:
        super().__init__()
        self._of = {"sharding": sharding}  # not registered as a child
        self._leaves = {
            id(leaf): owned
            for flat in sharding.flats
            for leaf, owned in zip(flat.leaves, flat.owned, strict=True)
        }

    def named_parameters(self, *_args: Any, **_options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once, under its first name."""
        sharding = self._of["sharding"]
        names = {record.name: owned for record, owned in sharding.owned()}
        yield from ((record.name, names[record.name]) for record in sharding.table)
        yield from sharding.ignored().items()

    def named_buffers(self, *_args: Any, **_options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's buffers."""
        yield from self._of["sharding"].model.named_buffers()

    def state_dict(  # type: ignore[override]  # without the argument `destination`
        self, *_args: Any, **_options: Any
    ) -> dict[str, Any]:
        """Return this rank's pieces of the parameters, by the names of the model."""
        state = nn.Module.state_dict(self._of["sharding"].model, keep_vars=True)
        return {name: self._leaves.get(id(tensor), tensor) for name, tensor in state.items()}


class _PiecesOf(Checkpoint):
    """Checkpoint from which a rank reads only its pieces."""

    def __init__(self, checkpoint: Checkpoint, sharding: Sharding) -> None:
        super().__init__(
            checkpoint.path, checkpoint.manifest, checkpoint.skipped, own_of=checkpoint.own_of
        )
        self._places = sharding.places_by_name()

    def names(self) -> dict[str, str]:
        """Return the names of tensors, without optimizer states that other ranks own."""
        return {name: full for name, full in super().names().items() if self._is_here(name)}

    def require(self, expected: Mapping[str, TensorSpec]) -> None:
        """Check the shapes of whole tensors, of which `expected` has this rank's pieces."""
        whole = {
            name: place[0].records[place[1]].spec
            if (place := self._places.get(name.removeprefix("model/")))
            else spec
            for name, spec in expected.items()
        }
        super().require(whole)

    def read(self, name: str, box: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return this rank's piece of the tensor `name`, or the slices `box` of it.

        If the tensor has another shape than its parameter, return all of it.
        """
        place = self._places.get(param_of(name))
        if place is None or box is not None:
            return super().read(name, box)
        flat, index = place
        entry = self.manifest.tensors[name]
        if tuple(entry.shape) != tuple(flat.shapes[index]) or not entry.shape:
            return super().read(name)
        piece, shape = flat.pieces[index], flat.shapes[index]
        if flat.whole:
            rows = slice(0, shape[0] if piece.numel else 0)
            return super().read(name, (rows, *(slice(0, size) for size in shape[1:])))
        parts = [
            super(_PiecesOf, self)
            .read(name, tuple(slice(o, o + e) for o, e in zip(b.offset, b.extent, strict=True)))
            .view(-1)
            for b in boxes_of(shape, piece.begin, piece.end)
        ]
        return (
            torch.cat(parts) if parts else super().read(name, (slice(0, 0),) * len(shape)).view(-1)
        )

    def _is_here(self, name: str) -> bool:
        place = self._places.get(param_of(name))
        if not name.startswith("optimizer/") or place is None:
            return True
        flat, index = place
        return flat.pieces[index].numel > 0 and not name.endswith(f"/{MASTER}")


def _boxes(flat: FlatShard, index: int, name: str, values: torch.Tensor) -> Iterator[Slice]:
    """Yield `values`, this rank's flat range of a tensor, as rectangular slices of the tensor."""
    piece, shape = flat.pieces[index], tuple(flat.shapes[index])
    flat_values = values.reshape(-1)
    for box in boxes_of(shape, piece.begin, piece.end):
        first = box.begin - piece.begin
        part = flat_values[first : first + math.prod(box.extent)]
        yield Slice(name, shape, box.offset, part.view(box.extent))
