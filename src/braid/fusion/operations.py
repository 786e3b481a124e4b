"""How what has been agreed on is carried out: for each kind several ways in order, of which the first that suits is taken.

Problem: one kind of operation has several good ways, by size, device and hosts, and users want to
know which one they got, and to add their own.

Idea: a list. Each operation says what it suits; `Operations.choose` takes the first and tells it
once a kind. What is reduced together goes through one buffer in memory that all ranks of the host
can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Protocol

import torch

from braid.comm import Group
from braid.errors import CommError
from braid.fusion.activities import Activities
from braid.fusion.batching import Batch
from braid.fusion.entry import Entry, Result, neutral
from braid.fusion.fusion_buffer import ALIGNMENT, FusionBuffer
from braid.fusion.request import Request

__all__ = ["Operation", "Operations", "default_operations"]


class Operation(Protocol):
    """One way of carrying out some batches.

    Attributes:
        name: For people.
        kind: Of request.
    """

    name: str
    kind: str

    def suits(self, batch: Batch) -> bool:
        """Whether it can carry out this batch; the same on all ranks."""
        ...

    def carry_out(self, batch: Batch, entries: Sequence[Entry]) -> list[Result]:
        """Do it, and return the results in the order of the batch."""
        ...


class Operations:
    """The ways that there are.

    Args:
        ways: In the order of preference.
        told: Called with a kind and the name of what is used for it, the first time.
    """

    def __init__(
        self, ways: Sequence[Operation], told: Callable[[str, str], None] | None = None
    ) -> None:
        self._ways = list(ways)
        self._told = told or (lambda _kind, _name: None)
        self._chosen: set[str] = set()

    def prefer(self, way: Operation) -> None:
        """Ask this one before all others."""
        self._ways.insert(0, way)

    def choose(self, batch: Batch) -> Operation:
        """The first that suits.

        Raises:
            CommError: There is none.
        """
        kind = batch.request.kind
        for way in self._ways:
            if way.kind == kind and way.suits(batch):
                if way.name not in self._chosen:
                    self._chosen.add(way.name)
                    self._told(kind, way.name)
                return way
        names = ", ".join(way.name for way in self._ways if way.kind == kind) or "nothing"
        msg = (
            f"expected a way to carry out {kind} of {batch.request.name!r} with "
            f"{batch.request.op!r}, found that none suits of {names}"
        )
        raise CommError(msg)

    def __repr__(self) -> str:
        return f"Operations({', '.join(way.name for way in self._ways)})"


class _Way:
    """What all of them have.

    Args:
        group: Ranks.
        activities: Where copies and transfer are noted.
    """

    def __init__(self, group: Group, activities: Activities) -> None:
        self._group = group
        self._activities = activities


class _AllReducing(_Way):
    """What ways of all_reduce have besides.

    Args:
        group: Ranks.
        activities: Where copies and transfer are noted.
        buffer: Where tensors are laid behind each other.
        algorithm: See `Group.all_reduce`.
    """

    def __init__(
        self, group: Group, activities: Activities, buffer: FusionBuffer, algorithm: str | None
    ) -> None:
        super().__init__(group, activities)
        self._buffer = buffer
        self._algorithm = algorithm


class BufferedAllReduce(_AllReducing):
    """Several tensors in one message, through a buffer."""

    name = "all_reduce through the fusion buffer"
    kind = "all_reduce"

    def suits(self, batch: Batch) -> bool:
        """Several at once."""
        return batch.request.op in REDUCTIONS and len(batch.responses) > 1

    def carry_out(self, batch: Batch, entries: Sequence[Entry]) -> list[Result]:
        """Copy in, reduce, copy out."""
        tensors = [entry.tensor for entry in entries if entry.tensor is not None]
        flat, views = self._buffer.views(batch, tensors)
        with self._activities.span("copy in", batch.nbytes):
            torch._foreach_copy_(views, tensors)
            scale(flat, batch.request.prescale)
        with self._activities.span("transfer", batch.nbytes):
            self._group.all_reduce(flat, batch.request.op, algorithm=self._algorithm)
        outs = [_out(entry) for entry in entries]
        with self._activities.span("copy out", batch.nbytes):
            scale(flat, batch.request.postscale)
            torch._foreach_copy_(outs, views)
        return list(outs)


class PlacedAllReduce(_AllReducing):
    """Tensors that lie side by side already, in runs as long as possible, without copies."""

    name = "all_reduce in place, side by side"
    kind = "all_reduce"

    def suits(self, batch: Batch) -> bool:
        """What has a place, the same on all ranks."""
        return batch.request.op in REDUCTIONS and batch.request.place >= 0

    def carry_out(self, batch: Batch, entries: Sequence[Entry]) -> list[Result]:
        """Reduce run by run."""
        requests = [response.request for response in batch.responses]
        for run in runs(requests):
            first, last = requests[run[0]], requests[run[-1]]
            numel = last.place + prod(last.shape) - first.place
            members = [entries[position] for position in run]
            gathered = any(entry.is_stand_in for entry in members)
            flat = self._gathered(members, numel) if gathered else _row(_given(members[0]), numel)
            with self._activities.span("transfer", numel * first.itemsize):
                scale(flat, first.prescale)
                self._group.all_reduce(flat, first.op, algorithm=self._algorithm)
                scale(flat, first.postscale)
            if gathered:
                for own, part in _parts(members, flat):
                    own.copy_(part)
        return [_out(entry) for entry in entries]

    def _gathered(self, members: Sequence[Entry], numel: int) -> torch.Tensor:
        """A run on a rank that has joined: what it had submitted before, amidst what changes nothing."""
        x = _given(members[0])
        flat = self._buffer.room(numel, x).fill_(neutral(members[0].request.op, x.dtype))
        for own, part in _parts(members, flat):
            part.copy_(own)
        return flat


class AllReduce(_AllReducing):
    """One tensor, where it lies."""

    name = "all_reduce in place"
    kind = "all_reduce"

    def suits(self, batch: Batch) -> bool:
        """Everything but several at once."""
        return batch.request.op in REDUCTIONS and len(batch.responses) == 1

    def carry_out(self, batch: Batch, entries: Sequence[Entry]) -> list[Result]:
        """Reduce in the place of the result."""
        (entry,) = entries
        out = _out(entry)
        if entry.tensor is not None and entry.tensor is not out:
            out.copy_(entry.tensor)
        scale(out, batch.request.prescale)
        with self._activities.span("transfer", batch.nbytes):
            self._group.all_reduce(out, batch.request.op, algorithm=self._algorithm)
        scale(out, batch.request.postscale)
        return [out]


class Broadcast(_Way):
    """From one rank to all."""

    name = "broadcast"
    kind = "broadcast"

    def suits(self, batch: Batch) -> bool:
        """All."""
        return batch.request.root >= 0

    def carry_out(self, batch: Batch, entries: Sequence[Entry]) -> list[Result]:
        """In the place of the result."""
        (entry,) = entries
        out = _out(entry)
        if (
            self._group.rank == batch.request.root
            and entry.tensor is not None
            and entry.tensor is not out
        ):
            out.copy_(entry.tensor)
        with self._activities.span("transfer", batch.nbytes):
            self._group.broadcast(out, batch.request.root)
        return [out]


class AllGather(_Way):
    """Rows of all ranks, behind each other; each may have another number of them."""

    name = "all_gather"
    kind = "all_gather"

    def suits(self, batch: Batch) -> bool:
        """All."""
        return bool(batch.responses[0].rows)

    def carry_out(self, batch: Batch, entries: Sequence[Entry]) -> list[Result]:
        """Into a new tensor."""
        (entry,) = entries
        x = _given(entry)
        rows = [count for (count,) in batch.responses[0].rows]
        out = x.new_empty((sum(rows), *x.shape[1:]))
        with self._activities.span("transfer", out.numel() * out.element_size()):
            if out.numel():
                self._group.all_gather(x.contiguous(), out=list(torch.split(out, rows)))
        return [out]


class AllToAll(_Way):
    """Rows for each rank, from each rank."""

    name = "all_to_all"
    kind = "all_to_all"

    def suits(self, batch: Batch) -> bool:
        """All."""
        return bool(batch.responses[0].rows)

    def carry_out(self, batch: Batch, entries: Sequence[Entry]) -> list[Result]:
        """Into a new tensor; and how many rows came from each rank."""
        (entry,) = entries
        x = _given(entry)
        table = batch.responses[0].rows
        sent = list(table[self._group.rank])
        received = [row[self._group.rank] for row in table]
        out = x.new_empty((sum(received), *x.shape[1:]))
        some = any(map(sum, table)) and all(x.shape[1:])
        with self._activities.span("transfer", out.numel() * out.element_size()):
            if some:
                self._group.all_to_all(
                    list(torch.split(x.contiguous(), sent)), out=list(torch.split(out, received))
                )
        return [(out, torch.tensor(received, dtype=torch.int32))]


class ReduceScatter(_Way):
    """The rows of the reduction, shared out: the first ranks get one more where they do not divide."""

    name = "reduce_scatter"
    kind = "reduce_scatter"

    def suits(self, batch: Batch) -> bool:
        """All that can be reduced."""
        return batch.request.op in REDUCTIONS

    def carry_out(self, batch: Batch, entries: Sequence[Entry]) -> list[Result]:
        """Into a new tensor."""
        (entry,) = entries
        x = _given(entry)
        size = self._group.size
        rows = [x.shape[0] // size + (rank < x.shape[0] % size) for rank in range(size)]
        out = x.new_empty((rows[self._group.rank], *x.shape[1:]))
        if x.numel():
            given = x
            if batch.request.prescale != 1.0:
                given = x.clone()
                scale(given, batch.request.prescale)
            with self._activities.span("transfer", batch.nbytes):
                self._group.reduce_scatter(
                    list(torch.split(given.contiguous(), rows)), batch.request.op, out=out
                )
            scale(out, batch.request.postscale)
        return [out]


class Nothing:
    """What is over when all have agreed: barrier, agree."""

    def __init__(self, kind: str) -> None:
        self.name = self.kind = kind

    def suits(self, batch: Batch) -> bool:
        """All."""
        return batch.request.kind == self.kind

    def carry_out(self, batch: Batch, entries: Sequence[Entry]) -> list[Result]:  # noqa: ARG002 - all have come
        """Nothing more."""
        return [None for _ in batch.responses]


REDUCTIONS = frozenset({"sum", "avg", "min", "max", "product"})


def default_operations(
    group: Group,
    buffer: FusionBuffer,
    activities: Activities,
    *,
    algorithm: str | None = None,
    told: Callable[[str, str], None] | None = None,
) -> Operations:
    """Those of this room.

    Args:
        group: Ranks.
        buffer: For what is reduced together.
        activities: Where copies and transfer are noted.
        algorithm: Of all_reduce; chosen by size and hosts when None.
        told: See `Operations`.
    """
    return Operations(
        [
            PlacedAllReduce(group, activities, buffer, algorithm),
            BufferedAllReduce(group, activities, buffer, algorithm),
            AllReduce(group, activities, buffer, algorithm),
            Broadcast(group, activities),
            AllGather(group, activities),
            AllToAll(group, activities),
            ReduceScatter(group, activities),
            Nothing("barrier"),
            Nothing("agree"),
        ],
        told,
    )


def runs(requests: Sequence[Request]) -> list[list[int]]:
    """Positions of requests whose tensors lie side by side, but for gaps of less than a cache line; by place.

    >>> requests = [Request("", "all_reduce", shape=(n,), itemsize=4, place=at) for n, at in [(30, 32), (30, 0), (8, 96)]]
    >>> runs(requests)
    [[1, 0], [2]]
    """
    found: list[list[int]] = []
    end = -1
    for position in sorted(range(len(requests)), key=lambda p: requests[p].place):
        request = requests[position]
        gap = (request.place - end) * request.itemsize
        if end < 0 or not 0 <= gap < ALIGNMENT:
            found.append([])
        found[-1].append(position)
        end = request.place + prod(request.shape)
    return found


def scale(x: torch.Tensor, factor: float) -> None:
    """Multiply in place: integers in 64-bit floats and cut off, 16-bit floats in 32 bits and rounded once."""
    if factor == 1.0:
        return
    if x.dtype.is_floating_point or x.dtype.is_complex:
        x.mul_(factor)
    else:
        x.copy_(x.double().mul_(factor))


def _row(x: torch.Tensor, numel: int) -> torch.Tensor:
    """So many elements as they lie in memory, from the first of `x` on."""
    return x.as_strided((numel,), (1,), x.storage_offset())


def _parts(
    members: Sequence[Entry], flat: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What this rank has submitted itself, as it lies in memory, each with its part of a run."""
    for entry in members:
        if not entry.is_stand_in:
            start = entry.request.place - members[0].request.place
            own = _row(_given(entry), _given(entry).numel())
            yield own, flat[start : start + own.numel()]


def _given(entry: Entry) -> torch.Tensor:
    if entry.tensor is None:
        msg = f"expected a tensor for {entry.request.kind} of {entry.request.name!r}, found none"
        raise CommError(msg)
    return entry.tensor


def _out(entry: Entry) -> torch.Tensor:
    return torch.empty_like(_given(entry)) if entry.out is None else entry.out
