"""Operations that carry out batches: the first suitable operation of a list is used.

Problem: one kind of operation has several good implementations, depending on size, device and
hosts. Users want to know which one is used, and to add their own.

Idea: a list of operations, each with a method `suits` for batches. `Operations.choose` uses the
first suitable one, and reports each choice once. Tensors that are reduced together are copied into
one buffer in memory that all ranks of the host can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Protocol

import torch

from braid.comm import Group
from braid.compat.horovod.fusion.batching import FusedBatch
from braid.compat.horovod.fusion.entry import Result, TensorTableEntry, neutral
from braid.compat.horovod.fusion.fusion_buffer import ALIGNMENT, FusionBuffer
from braid.compat.horovod.fusion.request import Request
from braid.compat.horovod.fusion.timeline import Timeline
from braid.errors import CommError
from braid.parallel.data_parallel import adasum
from braid.runtime.torch_internals import foreach_copy_

__all__ = ["BatchOperation", "Operations", "default_operations", "missing_memory", "needed_bytes"]


class BatchOperation(Protocol):
    """Implementation of an operation for some batches.

    Attributes:
        name: Descriptive name.
        kind: Kind of request.
    """

    name: str
    kind: str

    def suits(self, batch: FusedBatch) -> bool:
        """Return whether this operation can carry out a batch; the same on all ranks."""

    def carry_out(self, batch: FusedBatch, entries: Sequence[TensorTableEntry]) -> list[Result]:
        """Carry out a batch; return the results in the order of its responses."""


class Operations:
    """List of operations in the order of preference.

    Args:
        operations: Operations in the order of preference.
        on_choice: Called once for each kind of request and each operation that is used for it, with
            both names.
    """

    def __init__(
        self,
        operations: Sequence[BatchOperation],
        on_choice: Callable[[str, str], None] | None = None,
    ) -> None:
        self._operations = list(operations)
        self._on_choice = on_choice or (lambda _kind, _name: None)
        self._chosen: set[str] = set()

    def prefer(self, operation: BatchOperation) -> None:
        """Add an operation at the front of the list."""
        self._operations.insert(0, operation)

    def choose(self, batch: FusedBatch) -> BatchOperation:
        """Return the first registered operation that can carry out a batch.

        Raises:
            CommError: No operation suits the batch.
        """
        kind = batch.request.kind
        for operation in self._operations:
            if operation.kind == kind and operation.suits(batch):
                if operation.name not in self._chosen:
                    self._chosen.add(operation.name)
                    self._on_choice(kind, operation.name)
                return operation
        names = (
            ", ".join(operation.name for operation in self._operations if operation.kind == kind)
            or "nothing"
        )
        msg = (
            f"{kind} of {batch.request.name!r} with {batch.request.op!r} is not supported by any "
            f"of {names}: use another op"
        )
        raise CommError(msg)

    def __repr__(self) -> str:
        return f"Operations({', '.join(operation.name for operation in self._operations)})"


class _Base:
    """Base of operations.

    Args:
        group: Ranks that take part.
        timeline: Record of copies and transfers.
    """

    def __init__(self, group: Group, timeline: Timeline) -> None:
        self._group = group
        self._timeline = timeline

    def suits(self, batch: FusedBatch) -> bool:  # noqa: ARG002 - the only operation of its kind
        """Return True."""
        return True


class _AllReduceBase(_Base):
    """Base of operations for all_reduce.

    Args:
        group: Ranks that take part.
        timeline: Record of copies and transfers.
        buffer: Buffer for the concatenated tensors of a batch.
        algorithm: Algorithm, see `Group.all_reduce`.
    """

    def __init__(
        self, group: Group, timeline: Timeline, buffer: FusionBuffer, algorithm: str | None
    ) -> None:
        super().__init__(group, timeline)
        self._buffer = buffer
        self._algorithm = algorithm


class BufferedAllReduce(_AllReduceBase):
    """all_reduce of several tensors in one message, through the fusion buffer."""

    name = "all_reduce through the fusion buffer"
    kind = "all_reduce"

    def suits(self, batch: FusedBatch) -> bool:
        """Return whether the batch has several tensors."""
        return batch.request.op in REDUCTIONS and len(batch.responses) > 1

    def carry_out(self, batch: FusedBatch, entries: Sequence[TensorTableEntry]) -> list[Result]:
        """Copy the tensors into the fusion buffer, reduce it, and copy the results out."""
        tensors = [entry.tensor for entry in entries if entry.tensor is not None]
        flat, views = self._buffer.views(batch, tensors)
        with self._timeline.span("copy in", batch.nbytes):
            foreach_copy_(views, tensors)
            scale(flat, batch.request.prescale)
        with self._timeline.span("transfer", batch.nbytes):
            self._group.all_reduce(flat, batch.request.op, algorithm=self._algorithm)
        outs = [_out(entry) for entry in entries]
        with self._timeline.span("copy out", batch.nbytes):
            scale(flat, batch.request.postscale)
            foreach_copy_(outs, views)
        return list(outs)


class PlacedAllReduce(_AllReduceBase):
    """all_reduce without copies for adjacent tensors, in runs of maximal length."""

    name = "all_reduce in place, side by side"
    kind = "all_reduce"

    def suits(self, batch: FusedBatch) -> bool:
        """Return whether the tensors have places in shared memory, the same on all ranks."""
        return batch.request.op in REDUCTIONS and batch.request.place >= 0

    def carry_out(self, batch: FusedBatch, entries: Sequence[TensorTableEntry]) -> list[Result]:
        """Reduce each run of adjacent tensors as one flat tensor."""
        requests = [response.request for response in batch.responses]
        for run in runs(requests):
            first, last = requests[run[0]], requests[run[-1]]
            numel = last.place + prod(last.shape) - first.place
            members = [entries[position] for position in run]
            assembled = any(entry.is_stand_in for entry in members)
            flat = self._assembled(members, numel) if assembled else _row(_given(members[0]), numel)
            with self._timeline.span("transfer", numel * first.itemsize):
                scale(flat, first.prescale)
                self._group.all_reduce(flat, first.op, algorithm=self._algorithm)
                scale(flat, first.postscale)
            if assembled:
                for tensor, part in _parts(members, flat):
                    tensor.copy_(part)
        return [_out(entry) for entry in entries]

    def _assembled(self, members: Sequence[TensorTableEntry], numel: int) -> torch.Tensor:
        """Return a run on a rank that has joined: its submitted tensors, and neutral values."""
        x = _given(members[0])
        flat = self._buffer.scratch(numel, x).fill_(neutral(members[0].request.op, x.dtype))
        for tensor, part in _parts(members, flat):
            part.copy_(tensor)
        return flat


class AllReduce(_AllReduceBase):
    """all_reduce of one tensor, in the memory of the result."""

    name = "all_reduce in place"
    kind = "all_reduce"

    def suits(self, batch: FusedBatch) -> bool:
        """Return whether the batch has a single tensor."""
        return batch.request.op in REDUCTIONS and len(batch.responses) == 1

    def carry_out(self, batch: FusedBatch, entries: Sequence[TensorTableEntry]) -> list[Result]:
        """Reduce the tensor in the memory of the result."""
        (entry,) = entries
        out = _filled_out(entry)
        scale(out, batch.request.prescale)
        with self._timeline.span("transfer", batch.nbytes):
            self._group.all_reduce(out, batch.request.op, algorithm=self._algorithm)
        scale(out, batch.request.postscale)
        return [out]


class AdasumReduce(_Base):
    """Adasum of a batch, separately for each tensor, since tensors have different directions.

    Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
    """

    name = "adasum"
    kind = "all_reduce"

    def suits(self, batch: FusedBatch) -> bool:
        """Return whether the reduction is Adasum."""
        return batch.request.op == "adasum"

    def carry_out(self, batch: FusedBatch, entries: Sequence[TensorTableEntry]) -> list[Result]:
        """Reduce all tensors of the batch in the same messages."""
        outs = []
        for entry in entries:
            out = _filled_out(entry)
            scale(out, batch.request.prescale)
            outs.append(out)
        with self._timeline.span("transfer", batch.nbytes):
            adasum(outs, self._group)
        for out in outs:
            scale(out, batch.request.postscale)
        return list(outs)


class Broadcast(_Base):
    """broadcast from one rank to all ranks."""

    name = "broadcast"
    kind = "broadcast"

    def carry_out(self, batch: FusedBatch, entries: Sequence[TensorTableEntry]) -> list[Result]:
        """Broadcast the root's tensor into the memory of the result."""
        (entry,) = entries
        out = _filled_out(entry) if self._group.rank == batch.request.root else _out(entry)
        with self._timeline.span("transfer", batch.nbytes):
            self._group.broadcast(out, batch.request.root)
        return [out]


class AllGather(_Base):
    """all_gather of rows; ranks may have different numbers of rows."""

    name = "all_gather"
    kind = "all_gather"

    def carry_out(self, batch: FusedBatch, entries: Sequence[TensorTableEntry]) -> list[Result]:
        """Gather the rows of all ranks into a new tensor."""
        (entry,) = entries
        x = _given(entry)
        rows = [count for (count,) in batch.responses[0].rows]
        out = x.new_empty((sum(rows), *x.shape[1:]))
        with self._timeline.span("transfer", out.numel() * out.element_size()):
            if out.numel():
                self._group.all_gather(x.contiguous(), out=list(torch.split(out, rows)))
        return [out]


class AllToAll(_Base):
    """all_to_all of rows: each rank sends some rows to each rank."""

    name = "all_to_all"
    kind = "all_to_all"

    def carry_out(self, batch: FusedBatch, entries: Sequence[TensorTableEntry]) -> list[Result]:
        """Exchange rows; return a new tensor, and the number of rows from each rank."""
        (entry,) = entries
        x = _given(entry)
        table = batch.responses[0].rows
        sent = list(table[self._group.rank])
        received = [row[self._group.rank] for row in table]
        out = x.new_empty((sum(received), *x.shape[1:]))
        some = any(map(sum, table)) and all(x.shape[1:])
        with self._timeline.span("transfer", out.numel() * out.element_size()):
            if some:
                self._group.all_to_all(
                    list(torch.split(x.contiguous(), sent)), out=list(torch.split(out, received))
                )
        return [(out, torch.tensor(received, dtype=torch.int32))]


class ReduceScatter(_Base):
    """reduce_scatter of rows; if they do not divide evenly, the first ranks get one more."""

    name = "reduce_scatter"
    kind = "reduce_scatter"

    def suits(self, batch: FusedBatch) -> bool:
        """Return whether reduce_scatter supports the reduction of the batch."""
        return batch.request.op in REDUCTIONS

    def carry_out(self, batch: FusedBatch, entries: Sequence[TensorTableEntry]) -> list[Result]:
        """Reduce into a new tensor with this rank's rows."""
        (entry,) = entries
        x = _given(entry)
        size = self._group.size
        rows = [x.shape[0] // size + (rank < x.shape[0] % size) for rank in range(size)]
        out = x.new_empty((rows[self._group.rank], *x.shape[1:]))
        if x.numel():
            scaled = x
            if batch.request.prescale != 1.0:
                scaled = x.clone()
                scale(scaled, batch.request.prescale)
            with self._timeline.span("transfer", batch.nbytes):
                self._group.reduce_scatter(
                    list(torch.split(scaled.contiguous(), rows)), batch.request.op, out=out
                )
            scale(out, batch.request.postscale)
        return [out]


class Nothing:
    """Operation without data, which is done once all ranks have agreed: barrier, agree."""

    def __init__(self, kind: str) -> None:
        self.name = self.kind = kind

    def suits(self, batch: FusedBatch) -> bool:
        """Return whether the batch is of this operation's kind."""
        return batch.request.kind == self.kind

    def carry_out(self, batch: FusedBatch, entries: Sequence[TensorTableEntry]) -> list[Result]:  # noqa: ARG002
        """Return no results."""
        return [None for _ in batch.responses]


REDUCTIONS = frozenset({"sum", "avg", "min", "max", "product"})


def default_operations(
    group: Group,
    buffer: FusionBuffer,
    timeline: Timeline,
    *,
    algorithm: str | None = None,
    on_choice: Callable[[str, str], None] | None = None,
) -> Operations:
    """Return the operations of this package.

    Args:
        group: Ranks that take part.
        buffer: Buffer for tensors that are reduced together.
        timeline: Record of copies and transfers.
        algorithm: Algorithm of all_reduce; chosen by size and hosts when None.
        on_choice: As for `Operations`.
    """
    return Operations(
        [
            PlacedAllReduce(group, timeline, buffer, algorithm),
            BufferedAllReduce(group, timeline, buffer, algorithm),
            AllReduce(group, timeline, buffer, algorithm),
            AdasumReduce(group, timeline),
            Broadcast(group, timeline),
            AllGather(group, timeline),
            AllToAll(group, timeline),
            ReduceScatter(group, timeline),
            Nothing("barrier"),
            Nothing("agree"),
        ],
        on_choice,
    )


def needed_bytes(batch: FusedBatch) -> int:
    """Return an upper bound of the bytes that a rank allocates for a batch; same on all ranks."""
    response = batch.responses[0]
    if not response.rows:
        return batch.nbytes
    row_bytes = prod(response.request.shape[1:]) * response.request.itemsize
    return sum(map(sum, response.rows)) * row_bytes


def missing_memory(batch: FusedBatch, rank: int) -> str:
    """Return an error text if this rank lacks the memory for a batch; empty otherwise.

    Args:
        batch: Batch to carry out.
        rank: Position of this rank in the group.
    """
    request, rows = batch.request, batch.responses[0].rows
    nbytes = needed_bytes(batch)
    if request.kind == "all_to_all":
        num_rows = sum(row[rank] for row in rows) + sum(rows[rank])
        nbytes = num_rows * prod(request.shape[1:]) * request.itemsize
    try:
        torch.empty(nbytes, dtype=torch.uint8, device=request.device.partition(":")[0])
    except (RuntimeError, TypeError, OverflowError, MemoryError):  # some for ints beyond 64 bits
        return f"not enough memory for {nbytes} bytes of {request.name!r}: send smaller tensors"
    return ""


def runs(requests: Sequence[Request]) -> list[list[int]]:
    """Return the positions of requests in runs of adjacent tensors, ordered by place.

    Gaps of less than a cache line do not end a run.

    >>> layout = [(30, 32), (30, 0), (8, 96)]
    >>> kind = "all_reduce"
    >>> runs([Request("", kind, shape=(n,), itemsize=4, place=at) for n, at in layout])
    [[1, 0], [2]]
    """
    divided: list[list[int]] = []
    end = -1
    for position in sorted(range(len(requests)), key=lambda p: requests[p].place):
        request = requests[position]
        gap = (request.place - end) * request.itemsize
        if end < 0 or not 0 <= gap < ALIGNMENT:
            divided.append([])
        divided[-1].append(position)
        end = request.place + prod(request.shape)
    return divided


def scale(x: torch.Tensor, factor: float) -> None:
    """Multiply a tensor by a factor, in place.

    Integers are multiplied in float64 and truncated; 16-bit floats are multiplied in float32 and
    rounded once.
    """
    if factor == 1.0:
        return
    if x.dtype.is_floating_point or x.dtype.is_complex:
        x.mul_(factor)
    else:
        x.copy_(x.double().mul_(factor))


def _row(x: torch.Tensor, numel: int) -> torch.Tensor:
    """Return `numel` elements in memory order, beginning with the first element of `x`."""
    return x.as_strided((numel,), (1,), x.storage_offset())


def _parts(
    members: Sequence[TensorTableEntry], flat: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's submitted tensors in memory order, with their parts of a run."""
    for entry in members:
        if not entry.is_stand_in:
            start = entry.request.place - members[0].request.place
            row = _row(_given(entry), _given(entry).numel())
            yield row, flat[start : start + row.numel()]


def _given(entry: TensorTableEntry) -> torch.Tensor:
    if entry.tensor is None:
        msg = f"{entry.request.kind} of {entry.request.name!r} got no tensor on this rank: pass one"
        raise CommError(msg)
    return entry.tensor


def _out(entry: TensorTableEntry) -> torch.Tensor:
    return torch.empty_like(_given(entry)) if entry.out is None else entry.out


def _filled_out(entry: TensorTableEntry) -> torch.Tensor:
    """Return the memory of the result, filled with the input."""
    out = _out(entry)
    if entry.tensor is not None and entry.tensor is not out:
        out.copy_(entry.tensor)
    return out
