"""Parts of a training on ranks, and the whole state out of them.

Problem: when ranks are lost, the others have a division of the state that no longer fits, in memory
only, and a copy of what each lost rank had.

Idea: a *part* is trained by one rank. It knows the boxes of whole tensors that its tensors are, as
plain numbers, so any rank can keep a copy of any part. The members put the boxes of all parts
together, each from the first member that has the part. A part that several have must be the same,
by its checksum.

    part "pp=0"    model/first.weight       box (0, 0) of (8, 4)
                   optimizer/first.weight/exp_avg, likewise

While members go over to a new division, both are kept. If one is lost meanwhile, the newest
division of which all parts are left counts.

Cost: each part once over all ranks (a + b*l), and the whole state in the memory of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from braid.checkpoint import Slice, to_plain
from braid.comm import Group
from braid.errors import CheckpointError, MismatchError
from braid.parallel.gradients import FlatBuffer
from braid.parallel.gradients.hashing import checksum
from braid.types import dtype_name

__all__ = [
    "LostStateError",
    "ModelPart",
    "TensorBox",
    "WholeState",
    "boxes_of",
    "packed",
    "whole_state",
]

ALIGNMENT = 64  # bytes


class LostStateError(CheckpointError):
    """No member has some part of the state."""


class TensorBox(NamedTuple):
    """Elements of a tensor, which has no gaps, that are a box of a whole one.

    Attributes:
        whole: Shape of the whole tensor.
        offset: First index of the box in it, per dim.
        extent: Shape of the box.
        strides: Strides of the box in the tensor.
        start: Its first element there.
    """

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @classmethod
    def parse(cls, fields: Sequence[Any]) -> TensorBox:
        """Return the box that has come as plain data."""
        whole, offset, extent, strides, start = fields
        return cls(tuple(whole), tuple(offset), tuple(extent), tuple(strides), start)

    @classmethod
    def all_of(cls, tensor: torch.Tensor) -> TensorBox:
        """Return the box of a tensor that is whole."""
        shape = tuple(tensor.shape)
        strides = torch.empty(shape, device="meta").stride()
        return cls(shape, (0,) * len(shape), shape, strides, 0)

    @classmethod
    def of(cls, piece: Slice, tensor: torch.Tensor) -> TensorBox:
        """Return the box of a piece of a checkpoint that is a view of a tensor."""
        if tuple(piece.tensor.shape) == tuple(tensor.shape):
            return cls.all_of(tensor)._replace(whole=piece.global_shape, offset=piece.offset)
        assert tensor.is_contiguous(), f"a part of {piece.name} has gaps"
        start = int(piece.tensor.storage_offset() - tensor.storage_offset())
        extent = tuple(piece.tensor.shape)
        return cls(piece.global_shape, piece.offset, extent, piece.tensor.stride(), start)

    def copy(self, tensor: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy the box out of the tensor into the whole one."""
        for dim, (first, length) in enumerate(zip(self.offset, self.extent, strict=True)):
            whole = whole.narrow(dim, first, length)
        start = tensor.storage_offset() + self.start
        whole.copy_(tensor.as_strided(self.extent, self.strides, start))


class _PartTensor(NamedTuple):
    """A tensor of a part.

    Attributes:
        name: Name of the whole tensor, as in a checkpoint.
        boxes: Boxes that it is.
        tensor: Its values.
    """

    name: str
    boxes: Sequence[TensorBox]
    tensor: torch.Tensor


class ModelPart(NamedTuple):
    """Parameters that a rank trains, with all that belongs to them.

    Attributes:
        name: Place on the mesh: `pp=1,tp=0`.
        params: Parameters that the optimizer changes, by the names of whole ones.
        boxes: Boxes of whole parameters that they are, by name.
        optimizer: Its optimizer, which may have other parameters, too.
        buffers: Returns the buffers of the layers that are here, by name; forwards may replace
            them.
    """

    name: str
    params: Mapping[str, nn.Parameter]
    boxes: Mapping[str, Sequence[TensorBox]]
    optimizer: Optimizer
    buffers: Callable[[], Mapping[str, torch.Tensor]]

    def entries(self) -> Iterator[_PartTensor]:
        """Yield the tensors of the part."""
        for name, boxes in self.boxes.items():
            param = self.params[name]
            yield _PartTensor(f"model/{name}", boxes, param.detach())
            for key, value in self.optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    is_alike = value.dim() and value.shape == param.shape
                    places = boxes if is_alike else [TensorBox.all_of(value)]
                    yield _PartTensor(f"optimizer/{name}/{key}", places, value.detach())
        for name, buffer in self.buffers().items():
            yield _PartTensor(f"buffer/{name}", [TensorBox.all_of(buffer)], buffer.detach())

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Return states of the optimizer that are no tensors, by parameter."""
        return {
            name: {
                key: to_plain(value, key, {})
                for key, value in self.optimizer.state.get(self.params[name], {}).items()
                if not isinstance(value, torch.Tensor)
            }
            for name in self.boxes
            if self.params[name] in self.optimizer.state
        }


class WholeState(NamedTuple):
    """The state of a training.

    Attributes:
        tensors: Whole tensors by the names of a checkpoint; buffers as `buffer/NAME`.
        numbers: States of the optimizer that are no tensors, by parameter.
    """

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, dict[str, Any]]


def boxes_of(
    pieces: Iterable[Slice], params: Mapping[str, torch.Tensor]
) -> dict[str, list[TensorBox]]:
    """Return the boxes of parameters, by name, from the pieces that a rank writes."""
    boxes: dict[str, list[TensorBox]] = {}
    for piece in pieces:
        root, _, name = piece.name.partition("/")
        if root == "model" and name in params:
            boxes.setdefault(name, []).append(TensorBox.of(piece, params[name].detach()))
    return boxes


def packed(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return memory for tensors in a row, in bytes, and their places as tensors without gaps."""
    sizes = [torch.Size((tensor.nbytes,)) for tensor in tensors]
    flat = FlatBuffer(
        sizes,
        torch.uint8,
        lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype),
        align=ALIGNMENT,
    )
    pairs = zip(flat.views, tensors, strict=True)
    return flat.tensor, [view.view(own.dtype).view(own.shape) for view, own in pairs]


def whole_state(
    group: Group, parts: Mapping[int, Sequence[ModelPart]], num_parts: Mapping[int, Sequence[str]]
) -> tuple[int, int, WholeState]:
    """Put the parts of all members together; a collective.

    Args:
        group: The members.
        parts: Parts that this member has, by the number of their division.
        num_parts: Names of all parts of each of these divisions.

    Returns:
        Number of the division, the first member that has a part of it, and the whole state.

    Raises:
        LostStateError: No member has some part.
        MismatchError: Members have a part with other values.
    """
    mine = {
        division: (
            list(num_parts[division]),
            {
                part.name: (
                    [
                        (e.name, [tuple(b) for b in e.boxes], list(e.tensor.shape),
                         dtype_name(e.tensor.dtype))
                        for e in part.entries()
                    ],
                    part.numbers(),
                    sum(checksum(e.tensor) for e in part.entries()) & 0xFFFFFFFF,
                )
                for part in own
            },
        )
        for division, own in parts.items()
    }  # fmt: skip
    held = group.objects.all_gather(mine)
    division = _newest(held)
    names = next(one[division][0] for one in held if division in one)
    whole = WholeState({}, {})
    for name in names:
        holders = [r for r, one in enumerate(held) if division in one and name in one[division][1]]
        _compare(group, name, {r: held[r][division][1][name][2] for r in holders})
        root = holders[0]
        entries, numbers, _ = held[root][division][1][name]
        whole.numbers.update(numbers)
        like = [
            torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for _, _, shape, dtype in entries
        ]
        memory, views = packed(like)
        if group.rank == root:
            part = next(own for own in parts[division] if own.name == name)
            for view, entry in zip(views, part.entries(), strict=True):
                view.copy_(entry.tensor)
        group.broadcast(memory, root)
        for (full, boxes, _, dtype), view in zip(entries, views, strict=True):
            for box in map(TensorBox.parse, boxes):
                if full not in whole.tensors:
                    whole.tensors[full] = torch.empty(box.whole, dtype=getattr(torch, dtype))
                box.copy(view, whole.tensors[full])
    return division, next(r for r, one in enumerate(held) if division in one), whole


def _newest(held: Sequence[Mapping[int, tuple[Sequence[str], Mapping[str, Any]]]]) -> int:
    """Return the newest division with all its parts."""
    missing: dict[int, list[str]] = {}
    for division in sorted({d for one in held for d in one}, reverse=True):
        left = {name for one in held if division in one for name in one[division][1]}
        names = next(one[division][0] for one in held if division in one)
        if left.issuperset(names):
            return division
        missing[division] = [name for name in names if name not in left]
    lost = "; ".join(missing[max(missing)]) if missing else "all"
    msg = (
        f"the state of {lost} is lost: the ranks that had it, and those with a copy of it, have "
        "died together"
    )
    raise LostStateError(msg)


def _compare(group: Group, name: str, sums: Mapping[int, int]) -> None:
    first, *others = sums
    for other in others:
        if sums[other] != sums[first]:
            msg = (
                f"rank {group.ranks[other]} has other values of the part {name} than rank "
                f"{group.ranks[first]}: something changes parameters outside of the optimizer, or "
                "is not deterministic"
            )
            raise MismatchError(msg)
