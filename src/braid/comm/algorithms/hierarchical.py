"""All-reduce over several hosts; each byte crosses the network only once.

Problem: a byte between hosts costs a hundred times as much as a byte inside one host. A ring over
all p ranks sends 2 (p-1)/p l over the network card of every host. With two ranks on each of two
hosts that is 1.5 l, where l is enough.

Idea: three phases, on slices (`node_map`). With L local peers a host, h hosts, l = bytes of the
tensor:

    local reduce   the member with slice i sums slice i of its local peers' slots   l / L of sums
    network        its cross-node peers exchange their sums                2 (h-1)/h l a host
    local gather   every local peer copies the other members' finished slices       l of copies

The tensor is cut into chunks, so that one chunk is summed while the next is on the wire and a third
is copied out. Chunk j takes its steps at these turns of one loop (up to D chunks are on the wire):

    turn       j        j + 1          j + 1 + D            [ j + 1 + 2 D ]     + 1
    chunk j    staged   summed, sent   sums of peers added  [ gathered ]        copied out

With two hosts, the cross-node peers exchange whole slices. With more hosts, each peer sums 1/h of
the slice and all gather the sums (in brackets). The card of a host carries 2 (h-1)/h l in both
cases.

A slot is reused after K = 2 D + 3 turns. A rank sums chunk j over its cross-node peers in the turn
in which it has seen that they sent it; they had then read the chunk of D turns before. A local peer
that publishes chunk j has copied out the chunk of 2 D + 3 turns before. A rank without a slice
waits for no other rank, so it checks explicitly that its slot has been read.

Numbers may cross the network in another format (`wire`). The sender's own sum is converted too, so
that all ranks end with the same bits. Sums are taken inside each host first, then over the hosts:
in the same order on all ranks and in every run, and in the order of ranks if every host has one.

Source: Thakur, Rabenseifner, Gropp (2005), sec. 5 (SMP-aware); slices as in Traeff, Hunold,
"Decomposing MPI Collectives for Exploiting Multi-lane Communication" (2020); pipelining of the
phases as in Jiang et al., "BytePS" (OSDI 2020), sec. 4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from braid.comm.channel.channel import Channel
from braid.comm.channel.staging import pieces
from braid.comm.channel.window import LINE_BYTES, Window
from braid.comm.formats import ErrorFeedback, WireFormat
from braid.comm.tensors.node_map import NodeMap
from braid.comm.tensors.reduction import combine, early_factor, finish
from braid.runtime.transport import Steps

__all__ = ["DEPTH", "Residuals", "hierarchical", "left_out"]

DEPTH = 2  # chunks on the wire, besides the chunk that is being summed
NUM_SPARE = 3  # slots, besides two for each chunk on the wire
MOST_BYTES = 512 << 10  # largest chunk: several slots fit into the cache
LEAST_BYTES = 64 << 10  # smallest chunk
CHUNKS = 4  # number of chunks of a tensor, if their size is between these limits
HEADER_BYTES = LINE_BYTES  # length of a row in a wire format, stored before the row

Residuals = dict[tuple[str, int, int], ErrorFeedback]  # by phase, row and chunk


def hierarchical(
    ch: Channel,
    x: torch.Tensor,
    op: str,
    scale: float | None,
    *,
    nodes: NodeMap,
    form: WireFormat | None = None,
    residuals: Residuals | None = None,
) -> Steps:
    """Reduce the flat tensor `x` over all members, in place.

    Args:
        ch: Channel of the group.
        x: Flat, contiguous tensor; float32 with a wire format.
        op: Reduction; sum or avg with a wire format.
        scale: Factor for the result.
        nodes: Members by host.
        form: Format of the numbers on the network; None for the tensor's dtype.
        residuals: Residuals of the last start of a persistent request; updated in place.
    """
    # no member ends before all have compared descriptions: every member needs sums of all members
    run = _AllReduceRun(ch, x, op, scale, nodes=nodes, form=form, residuals=residuals)
    yield from run.window.open()
    phases = [(run.stage, 0), (run.sum_local, 1), (run.sum_remote, 1 + DEPTH)]
    if run.gathers:
        phases.append((run.gather_remote, 1 + 2 * DEPTH))
    phases.append((run.copy_out, run.last_turn))
    for turn in range(len(run.chunks) + run.last_turn):
        for phase, delay in phases:
            if 0 <= turn - delay < len(run.chunks):
                yield from phase(turn - delay)
    run.window.take_last_step()


def left_out(
    residuals: Residuals,
    numel: int,
    op: str,
    rank: int,
    *,
    nodes: NodeMap,
    form: WireFormat,
) -> torch.Tensor:
    """Return the encoding errors that a member has not sent yet, as one flat tensor.

    They are converted to the units of the reduced tensor.

    Args:
        residuals: Encoding errors of the member, by phase, row and chunk.
        numel: Number of elements of the reduced tensor.
        op: Reduction. For avg, the sums over hosts are divided before they are sent.
        rank: Group rank of the member.
        nodes: Members by host.
        form: Wire format.
    """
    residual = torch.zeros(numel)
    chunks = _chunks(residual)
    layout = _SlotLayout.of(chunks[0], nodes, form)
    size = sum(len(members) for members in nodes.hosts)
    for (phase, k, j), kept in residuals.items():
        low, high = layout.slice(chunks[j].numel(), nodes.slice(rank))
        row = k if phase == "local" else nodes.cross_node_peers(rank).index(rank)
        start, end = layout.bounds(high - low)[row]
        factor = size if phase == "remote" and op == "avg" else 1
        chunks[j][low:high][start:end].add_(kept.state_dict()["residual"], alpha=factor)
    return residual


class _SlotLayout(NamedTuple):
    """Layout of the slot of a chunk, the same on every member.

        staged chunk | rows that are sent | row summed over the hosts | finished slice

    With one rank a host, the slot has no staged chunk and no finished slice: the tensor itself
    holds them.

    Attributes:
        most: Number of elements of a slice.
        rows: Number of rows of a slice: one for each host if there are more than two, else one.
        row: Number of elements of a row.
        row_bytes: Number of bytes of a row on the network.
        sent: First byte of the rows that are sent; the staged chunk begins at 0.
        summed: First byte of the summed row.
        finished: First byte of the finished slice.
        slot_bytes: Number of bytes of the slot.
    """

    most: int
    rows: int
    row: int
    row_bytes: int
    sent: int
    summed: int
    finished: int
    slot_bytes: int

    @classmethod
    def of(cls, chunk: torch.Tensor, nodes: NodeMap, form: WireFormat | None) -> _SlotLayout:
        """Return the layout for the chunks of a tensor.

        Args:
            chunk: First chunk, which is the longest.
            nodes: Members by host.
            form: Wire format; None for the tensor's own dtype.
        """
        numel, size = chunk.numel(), chunk.element_size()
        num_hosts = len(nodes.hosts)
        alone = nodes.most == 1
        gathers = num_hosts > 2
        most = -(-numel // nodes.num_slices)
        rows = num_hosts if gathers else 1
        row = -(-most // rows)
        row_bytes = _lines(row * size)
        if form is not None:
            row_bytes = HEADER_BYTES + _lines(form.nbytes(row))
        sent = 0 if alone else _lines(numel * size)
        summed = sent + rows * row_bytes
        finished = summed + (row_bytes if gathers else 0)
        end = finished + (0 if alone else _lines(most * size))
        return cls(most, rows, row, row_bytes, sent, summed, finished, end)

    def slice(self, numel: int, number: int) -> tuple[int, int]:
        """Return the first and past-the-end element of a slice in a chunk of `numel` elements."""
        return min(numel, self.most * number), min(numel, self.most * (number + 1))

    def bounds(self, numel: int) -> list[tuple[int, int]]:
        """Return the first and past-the-end element of each row of a slice of `numel` elements."""
        step = self.row
        return [(min(numel, step * k), min(numel, step * (k + 1))) for k in range(self.rows)]


class _AllReduceRun:
    """State of one all-reduce. Each method is one phase of one chunk."""

    def __init__(
        self,
        ch: Channel,
        x: torch.Tensor,
        op: str,
        scale: float | None,
        *,
        nodes: NodeMap,
        form: WireFormat | None,
        residuals: Residuals | None,
    ) -> None:
        self.ch = ch
        self.op = op
        self.scale = scale
        self.form = form
        self.residuals = residuals
        self.own_slice = nodes.slice(ch.rank)
        self.local_peers = nodes.local_peers(ch.rank)
        self.cross_node_peers = nodes.cross_node_peers(ch.rank)
        self.workers = self.local_peers[: nodes.num_slices]
        self.other_local_peers = tuple(m for m in self.local_peers if m != ch.rank)
        self.other_cross_node_peers = tuple(t for t in self.cross_node_peers if t != ch.rank)
        self.chunks = _chunks(x)
        self.dtype = x.dtype
        self.layout = _SlotLayout.of(self.chunks[0], nodes, form)
        self.gathers = self.layout.rows > 1
        self.last_turn = 2 + (2 if self.gathers else 1) * DEPTH
        self.num_slots = min(2 * DEPTH + NUM_SPARE, len(self.chunks))
        self.window = Window(ch, max(LINE_BYTES, self.num_slots * self.layout.slot_bytes))
        several = nodes.most > 1
        self.early = early_factor(x.dtype, op, scale, ch.size) if several else None
        self.values: dict[tuple[str, int], int] = {}  # step of each phase, by phase and chunk
        self.lengths: list[int] = []  # bytes of the rows to send next

    def stage(self, j: int) -> Steps:
        """Publish chunk `j` to the local peers."""
        if j >= self.num_slots:  # only a rank without a slice can be too early
            yield from self.window.reached(self.workers, self.values["sent", j - self.num_slots])
        chunk = self.chunks[j]
        if len(self.local_peers) > 1:
            self._view(self.ch.rank, j, 0, chunk.numel()).copy_(chunk)
        self.values["staged", j] = self.window.publish(self.other_local_peers)

    def sum_local(self, j: int) -> Steps:
        """Sum this rank's slice of chunk `j` over the local peers, and send the sum."""
        self.lengths.clear()
        if self.own_slice >= 0:
            yield from self.window.reached(self.local_peers, self.values["staged", j])
            numel = self.chunks[j].numel()
            low, high = self._slice(j, self.own_slice)
            sources = [
                (self.chunks[j] if m == self.ch.rank else self._view(m, j, 0, numel))[low:high]
                for m in self.local_peers
            ]
            for k, (start, end) in enumerate(self.layout.bounds(high - low)):
                parts = [source[start:end] for source in sources]
                self._write_row(
                    parts, j, self.layout.sent + k * self.layout.row_bytes, ("local", k)
                )
        self.values["sent", j] = self._send(j, self.layout.sent)

    def sum_remote(self, j: int) -> Steps:
        """Sum this rank's slice of chunk `j`, or its row of it, over the cross-node peers."""
        self.lengths.clear()
        if self.own_slice >= 0:
            yield from self.window.reached(self.cross_node_peers, self.values["sent", j])
            if self.gathers:
                low, high = self._slice(j, self.own_slice)
                index = self.cross_node_peers.index(self.ch.rank)
                start, end = self.layout.bounds(high - low)[index]
                total = self.ch.own.scratch(end - start, self.dtype)
                self._sum_rows(j, self.layout.sent + index * self.layout.row_bytes, total)
                self._write_row([total], j, self.layout.summed, ("remote", 0))
            else:
                self._sum_rows(j, self.layout.sent, self._done(j))
        if self.gathers:
            self.values["summed", j] = self._send(j, self.layout.summed)
        else:
            self.values["done", j] = self.window.publish(self.other_local_peers)

    def gather_remote(self, j: int) -> Steps:
        """Copy the parts of this rank's slice of chunk `j` that peers on other hosts summed."""
        if self.own_slice >= 0:
            yield from self.window.reached(self.cross_node_peers, self.values["summed", j])
            finished = self._done(j)
            for peer, (start, end) in zip(
                self.cross_node_peers, self.layout.bounds(finished.numel()), strict=True
            ):
                self._copy_row(peer, j, self.layout.summed, finished[start:end])
        self.values["done", j] = self.window.publish(self.other_local_peers)

    def copy_out(self, j: int) -> Steps:
        """Copy the finished slices of chunk `j` from the local peers."""
        if len(self.local_peers) == 1:  # the chunk was finished in place
            return
        yield from self.window.reached(self.workers, self.values["done", j])
        for number, worker in enumerate(self.workers):
            low, high = self._slice(j, number)
            self.chunks[j][low:high].copy_(self._view(worker, j, self.layout.finished, high - low))

    # Rows on the network, in the tensor's dtype or in a wire format.

    def _write_row(
        self,
        sources: list[torch.Tensor],
        j: int,
        at: int,
        key: tuple[str, int],
    ) -> None:
        """Sum `sources` into a row of this rank's slot, in the format for the network.

        Args:
            sources: Terms of the sum, on this host.
            j: Number of the chunk.
            at: First byte of the row in the slot.
            key: Phase and row: the key of the residuals.
        """
        numel, op = sources[0].numel(), "sum" if self.op == "avg" else self.op
        if self.form is None:
            factor = self.early if key[0] == "local" else None
            combine(sources, self._view(self.ch.rank, j, at, numel), op, factor)
            self.lengths.append(numel * self.dtype.itemsize)
            return
        total = sources[0]
        if len(sources) > 1:
            total = self.ch.own.scratch(numel, self.dtype)
            combine(sources, total, op, None)
        row = self._bytes(self.ch.rank, j, at)
        length = self._encode(total, row[HEADER_BYTES:], (*key, j))
        row[:8].view(torch.int64).fill_(length)
        self.lengths.append(HEADER_BYTES + length)

    def _encode(self, x: torch.Tensor, into: torch.Tensor, key: tuple[str, int, int]) -> int:
        """Encode `x` with the residual kept under `key`; return the number of bytes."""
        assert self.form is not None
        if self.residuals is None or not self.form.lossy:
            return self.form.encode(x, into)
        kept = self.residuals.get(key)
        if kept is None:
            kept = self.residuals[key] = ErrorFeedback(x.numel())
        return kept.encode(self.form, x, into)

    def _send(self, j: int, at: int) -> int:
        """Send the rows just written: to each cross-node peer its row, or the only row to all.

        Returns:
            Value of the step.
        """
        if not self.lengths:  # no slice
            return self.window.publish(())
        row_bytes = self.layout.row_bytes
        rows = [
            self.cross_node_peers.index(t) if len(self.lengths) > 1 else 0
            for t in self.other_cross_node_peers
        ]
        parts = [(k * row_bytes, k * row_bytes + self.lengths[k]) for k in rows]
        nbytes = (len(self.lengths) - 1) * row_bytes + self.lengths[-1]
        return self.window.publish(self.other_cross_node_peers, self._offset(j, at), nbytes, parts)

    def _sum_rows(self, j: int, at: int, out: torch.Tensor) -> None:
        """Sum the cross-node peers' rows into `out`, in the order of hosts, and scale the sum."""
        if self.form is not None:
            out.zero_()
            for peer in self.cross_node_peers:
                self.form.add(self._encoded(peer, j, at), out)
            finish(out, self.op, self.ch.size, self.scale)
            return
        sources = [self._view(t, j, at, out.numel()) for t in self.cross_node_peers]
        if self.early is not None:
            combine(sources, out, "sum", None)
        elif self.op != "avg" or len(sources) == self.ch.size:
            combine(sources, out, self.op, self.scale)
        else:
            combine(sources, out, "sum", None)
            finish(out, self.op, self.ch.size, self.scale)

    def _copy_row(self, peer: int, j: int, at: int, out: torch.Tensor) -> None:
        """Copy a finished row of a cross-node peer to `out`."""
        if self.form is None:
            out.copy_(self._view(peer, j, at, out.numel()))
        else:
            self.form.decode(self._encoded(peer, j, at), out)

    def _encoded(self, peer: int, j: int, at: int) -> torch.Tensor:
        """Return the encoded bytes of a peer's row, without its length header."""
        row = self._bytes(peer, j, at)
        length = int(row[:8].view(torch.int64).item())
        return row[HEADER_BYTES : HEADER_BYTES + min(max(length, 0), row.numel())]

    # Views.

    def _slice(self, j: int, number: int) -> tuple[int, int]:
        return self.layout.slice(self.chunks[j].numel(), number)

    def _done(self, j: int) -> torch.Tensor:
        """Return the memory for this rank's finished slice of chunk `j`."""
        low, high = self._slice(j, self.own_slice)
        if len(self.local_peers) == 1:
            return self.chunks[j][low:high]
        return self._view(self.ch.rank, j, self.layout.finished, high - low)

    def _offset(self, j: int, offset: int) -> int:
        """Return the position in the window of byte `offset` in the slot of chunk `j`."""
        return j % self.num_slots * self.layout.slot_bytes + offset

    def _view(self, member: int, j: int, offset: int, numel: int) -> torch.Tensor:
        return self.window.view(member, self._offset(j, offset), numel, self.dtype)

    def _bytes(self, member: int, j: int, offset: int) -> torch.Tensor:
        return self.window.view(member, self._offset(j, offset), self.layout.row_bytes, torch.uint8)


def _chunks(x: torch.Tensor) -> list[torch.Tensor]:
    return pieces(x, min(MOST_BYTES, max(LEAST_BYTES, x.nbytes // CHUNKS)))


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE_BYTES) * LINE_BYTES
