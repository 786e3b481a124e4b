"""Moves the state of a training from one division of the model to another, in memory.

Problem: when ranks are lost, the others have a division of the state that no longer fits, in memory
only, and copies of what each lost rank had. No rank may need memory for the whole state.

Idea: all members know the boxes that each of them has, and those that each of them gets. Where two
boxes overlap, the elements go from the one to the other, each from one member that has them. What
several have must be the same, by its checksum, and they share the sending.

    weight (8, 4)    before: r0 rows 0-3, r1 rows 4-7      after: r0 rows 0-2, r2 rows 3-5, ...
                     r0 keeps rows 0-2, and sends row 3 to r2

While members go over to a new division, both are kept. If a member is lost meanwhile, the
newest complete division counts.

Cost: each member gets its new part once (a + b*l), less what it had.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from braid.checkpoint import from_plain
from braid.comm import Group
from braid.elasticity.parts import ModelPart, PartTensor, TensorBox, packed
from braid.elasticity.state_transfer import DAMAGED
from braid.errors import CheckpointError, MismatchError
from braid.runtime.tensor_buffers import checksum
from braid.types import dtype_name

__all__ = ["LostStateError", "NewestState", "fill", "newest_state"]


class LostStateError(CheckpointError):
    """Error if some part of the training state is lost: no member has this part."""


class _Source(NamedTuple):
    """A box that a member has: its rank, the part, and the number of the tensor in it."""

    rank: int
    part: str
    number: int
    box: TensorBox


class _Tensor(NamedTuple):
    """A whole tensor in boxes; see `PartTensor`. Equal boxes are listed by rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_alike: bool
    is_placed: bool
    sources: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[int, _Source]]


class NewestState(NamedTuple):
    """The newest state that all members together still have, in one division of the model.

    Attributes:
        division: Number of the division, a way to divide the model among ranks.
        root: First member that has a part of the state.
        tensors: Whole tensors by the names of a checkpoint; buffers as `buffer/NAME`.
        numbers: Optimizer states other than tensors, by parameter.
    """

    division: int
    root: int
    tensors: dict[str, _Tensor]
    numbers: dict[str, dict[str, Any]]


def newest_state(
    group: Group, parts: Mapping[int, Sequence[ModelPart]], num_parts: Mapping[int, Sequence[str]]
) -> NewestState:
    """Find the newest state that the members together still have; a collective.

    Args:
        group: The members.
        parts: Parts that this member has, by number of the division (way to divide the model).
        num_parts: Names of all parts of each division, by its number.

    Raises:
        LostStateError: No member has some part.
        MismatchError: Members have different values of the same tensor.
    """
    mine = {
        division: (
            list(num_parts[division]),
            {part.name: (list(map(_plain, part.entries())), part.numbers()) for part in held_parts},
        )
        for division, held_parts in parts.items()
    }
    held = group.objects.all_gather(mine)
    division = _newest(held)
    newest = NewestState(division, next(r for r, one in enumerate(held) if division in one), {}, {})
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for rank, one in enumerate(held):
        for part, (entries, numbers) in one[division][1].items() if division in one else ():
            newest.numbers.update(numbers)
            for number, (name, boxes, shape, dtype, is_alike, is_placed, value) in enumerate(
                entries
            ):
                first, expected = sums.setdefault((name, str(boxes)), (rank, value))
                if value != expected:
                    number_of = group.context.health.number
                    names = [number_of(group.ranks[r]) for r in (rank, first)]
                    msg = (
                        f"rank {names[0]} and rank {names[1]} have different "
                        f"values of {name} (part {part}): something changes parameters outside "
                        "of the optimizer, or is not deterministic"
                    )
                    raise MismatchError(msg)
                kind = _Tensor(tuple(shape), getattr(torch, dtype), is_alike, is_placed, {})
                sources = newest.tensors.setdefault(name, kind).sources
                for box in map(TensorBox.parse, boxes):
                    alike = sources.setdefault((box.offset, box.extent), {})
                    alike[rank] = _Source(rank, part, number, box)
    return newest


def _plain(entry: PartTensor) -> tuple[Any, ...]:
    tensor = entry.tensor
    boxes = [tuple(box) for box in entry.boxes]
    kind = (list(tensor.shape), dtype_name(tensor.dtype), entry.is_alike, entry.is_placed)
    return (entry.name, boxes, *kind, checksum(tensor))


def _newest(held: Sequence[Mapping[int, tuple[Sequence[str], Mapping[str, Any]]]]) -> int:
    """Return the newest division with all its parts."""
    missing: dict[int, list[str]] = {}
    for division in sorted({d for one in held for d in one}, reverse=True):
        present = {name for one in held if division in one for name in one[division][1]}
        names = next(one[division][0] for one in held if division in one)
        if present.issuperset(names):
            return division
        missing[division] = [name for name in names if name not in present]
    lost = "; ".join(missing[max(missing)]) if missing else "all"
    msg = f"the state of {lost} is lost, because all ranks that had it have ended"
    raise LostStateError(msg)


def fill(group: Group, newest: NewestState, parts: Sequence[ModelPart], part: ModelPart) -> None:
    """Copy the newest state into each member's new part; a collective.

    Args:
        group: The members.
        newest: The newest state.
        parts: Parts of the newest state that this member has.
        part: New part of this member; its optimizer has no states yet.
    """
    _make_states(newest, part)
    boxless = part.params.keys() - part.boxes.keys()  # `_moves` refuses those with elements
    targets = list(part.entries())
    targets += [PartTensor(f"model/{name}", (), part.params[name]) for name in sorted(boxless)]
    wanted = [(t.name, t.tensor.numel(), [tuple(box) for box in t.boxes]) for t in targets]
    of_all = [
        [(name, numel, list(map(TensorBox.parse, boxes))) for name, numel, boxes in one]
        for one in group.objects.all_gather(wanted)
    ]
    had = {old.name: list(old.entries()) for old in parts}
    sent: dict[int, list[torch.Tensor]] = defaultdict(list)
    received: dict[int, list[torch.Tensor]] = defaultdict(list)
    for rank, one in enumerate(of_all):
        for number, box, source, (offset, extent) in _moves(newest, one, rank):
            here = group.rank == rank
            if group.rank == source.rank:
                tensor = had[source.part][source.number].tensor
                values = source.box.view(tensor, offset, extent)
                if here:
                    box.view(targets[number].tensor, offset, extent).copy_(values)
                else:
                    sent[rank].append(values)
            elif here:
                received[source.rank].append(box.view(targets[number].tensor, offset, extent))
    _exchange(group, sent, received)


def _make_states(newest: NewestState, part: ModelPart) -> None:
    """Make states of the optimizer, without values, with the shapes and dtypes of other parts."""
    states: dict[str, dict[str, _Tensor]] = defaultdict(dict)
    for name, tensor in newest.tensors.items():
        root, _, rest = name.partition("/")
        if root == "optimizer":
            param_name, _, key = rest.rpartition("/")
            states[param_name][key] = tensor
    for name, boxes in part.boxes.items():
        param = part.params[name]
        if not boxes or not (name in states or name in newest.numbers):
            continue
        state = {
            key: torch.empty(
                param.shape if tensor.is_alike else tensor.shape,
                dtype=tensor.dtype,
                device=param.device if tensor.is_placed else "cpu",
            )
            for key, tensor in states[name].items()
        }
        numbers = newest.numbers.get(name, {}).items()
        kept = {key: from_plain(value, state.__getitem__) for key, value in numbers}
        part.optimizer.state[param] = {**kept, **state}


def _moves(
    newest: NewestState, wanted: Sequence[tuple[str, int, Sequence[TensorBox]]], rank: int
) -> Iterator[tuple[int, TensorBox, _Source, tuple[Sequence[int], Sequence[int]]]]:
    """Yield what a member gets, the same on all members.

    Each item has the number of the tensor in its part, the box, where the elements come from, and
    their offset and shape.

    Raises:
        LostStateError: The member would not get all elements of a tensor.
    """
    for number, (name, numel, boxes) in enumerate(wanted):
        missing = numel
        for box in boxes:
            for alike in newest.tensors[name].sources.values():
                holder = rank if rank in alike else list(alike)[rank % len(alike)]
                common = alike[holder].box.common(box)
                if common is not None:
                    missing -= math.prod(common[1])
                    yield number, box, alike[holder], common
        if missing and not name.startswith("buffer/"):  # which a forward may replace
            msg = f"{missing} of {numel} elements of {name} are lost: resume from a checkpoint"
            raise LostStateError(msg)


def _exchange(
    group: Group,
    sent: Mapping[int, Sequence[torch.Tensor]],
    received: Mapping[int, Sequence[torch.Tensor]],
) -> None:
    """Send tensors to members, and receive others, in one message for each pair."""
    works = []
    memories = []
    for rank, tensors in received.items():
        memory, views = packed(tensors)
        sum_ = torch.zeros(1, dtype=torch.int64)
        memories.append((tensors, views, memory, sum_))
        works += [group.recv(part, rank, async_op=True) for part in (memory, sum_)]
    for rank, tensors in sent.items():
        memory, views = packed(tensors)
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
        sum_ = torch.tensor([checksum(memory)], dtype=torch.int64)
        works += [group.send(part, rank, async_op=True) for part in (memory, sum_)]
    for work in works:
        work.wait()
    for tensors, views, memory, sum_ in memories:
        if checksum(memory) != sum_.item():
            msg = f"a part of the state arrived with other values than were sent: {DAMAGED}"
            raise CheckpointError(msg)
        for tensor, view in zip(tensors, views, strict=True):
            tensor.copy_(view)
