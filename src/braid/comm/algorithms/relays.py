"""Broadcast, all-gather and reduce-scatter over several hosts, by relays.

Problem: with four ranks on two hosts, a rank that sends its part to all other ranks sends it twice
over the same cable, to two ranks that share memory.

Idea: each rank has one *relay* on every other host, and publishes its part to its local peers and
relays only. A relay publishes the received part to its local peers, so every byte crosses the
network once per host, not once per rank. Reductions run in the opposite direction: a rank's relay
sums for it over the relay's host. Tensors are cut into chunks, with up to D on the wire, as in
`hierarchical`:

    broadcast        root -> its local peers and relays -> their local peers    (h-1) l a host
    all_gather       each rank -> local peers and relays -> their local peers   L (h-1)/n l
    reduce_scatter   local peers -> the relay sums -> the owner adds the sums   (n-L)/n l

    n ranks, h hosts, L ranks on this host; relays of the members of host a on host b, which has
    fewer members:
        a   0  1  2
        b   3  4  3

A slot is reused K turns later, once the readers have published that they have read it, in a step
that they take anyway.

Source: node-leader algorithms as in Karonis et al., "Exploiting hierarchy in parallel computer
networks to optimize collective operation performance" (2000), with all ranks of a host as leaders
of their parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from braid.comm.channel.channel import Channel
from braid.comm.channel.window import LINE_BYTES, Window
from braid.comm.tensors.node_map import NodeMap
from braid.comm.tensors.reduction import combine, early_factor, finish
from braid.runtime.transport import Steps

__all__ = ["DEPTH", "all_gather", "broadcast", "reduce_scatter"]

DEPTH = 2  # chunks on the wire, besides the chunk that is being copied
NUM_SLOTS = DEPTH + 4
CHUNK_BYTES = 256 << 10  # for all rows of a slot together


class _Slots:
    """Rows of chunks, in the windows of all members.

    Args:
        ch: Channel of the group.
        like: Tensor of the dtype.
        rows: Number of rows of a slot.
        longest: Number of elements of the longest part.
    """

    def __init__(self, ch: Channel, like: torch.Tensor, rows: int, longest: int) -> None:
        size = like.element_size()
        self.chunk = max(1, min(longest, CHUNK_BYTES // size // max(1, rows)))
        self.count = max(1, -(-longest // self.chunk))
        self._dtype = like.dtype
        self._size = size
        self._row_bytes = -(-self.chunk * size // LINE_BYTES) * LINE_BYTES
        self._slot_bytes = rows * self._row_bytes
        slots = min(NUM_SLOTS, self.count)
        self.window = Window(ch, max(LINE_BYTES, slots * self._slot_bytes))

    def part(self, x: torch.Tensor, j: int) -> torch.Tensor:
        """Return chunk `j` of a flat tensor; the last ones may be short or empty."""
        return x[j * self.chunk : (j + 1) * self.chunk]

    def row(self, member: int, j: int, row: int, numel: int) -> torch.Tensor:
        """Return a row of a member's slot for chunk `j`."""
        return self.window.view(member, self._at(j, row), numel, self._dtype)

    def publish(
        self, to: Sequence[int], j: int, rows: dict[int, tuple[int, int]] | None = None
    ) -> int:
        """Take a step that `to` reads; `rows` maps a reader to its row and number of elements."""
        if not rows:
            return self.window.publish(to)
        first = min(row for row, _ in rows.values())
        parts = []
        for member in to:
            row, numel = rows.get(member, (first, 0))
            start = (row - first) * self._row_bytes
            parts.append((start, start + numel * self._size))
        nbytes = max(end for _, end in parts)
        return self.window.publish(to, self._at(j, first), nbytes, parts)

    def _at(self, j: int, row: int) -> int:
        return j % NUM_SLOTS * self._slot_bytes + row * self._row_bytes


def broadcast(ch: Channel, x: torch.Tensor, root: int, nodes: NodeMap) -> Steps:
    """Copy the flat tensor `x` of `root` into `x` of every member.

    `nodes` has the members by host.
    """
    me, local_peers = ch.rank, _without(nodes.local_peers(ch.rank), ch.rank)
    relays = nodes.relays(root)
    slots = _Slots(ch, x, 1, x.numel())
    yield from slots.window.open()
    is_local = root in local_peers or me == root
    source = root if is_local or me in relays else nodes.relay(root, me)
    readers = (*local_peers, *relays) if me == root else local_peers if me in relays else ()
    listeners = readers if me == root else (*readers, source)
    values: list[int] = []
    for j in range(slots.count):
        part = slots.part(x, j)
        if me != root:
            yield from slots.window.reached([source], slots.window.value_of(j))
            part.copy_(slots.row(source, j, 0, part.numel()))
        if readers:
            if j >= NUM_SLOTS:
                yield from slots.window.reached(readers, values[j - NUM_SLOTS])
            slots.row(me, j, 0, part.numel()).copy_(part)
        rows = {reader: (0, part.numel()) for reader in readers}
        values.append(slots.publish(listeners, j, rows))
    yield from slots.window.close()


def all_gather(ch: Channel, outs: Sequence[torch.Tensor], x: torch.Tensor, nodes: NodeMap) -> Steps:
    """Copy the flat tensor `x` of each rank r into `outs[r]`; sizes may differ.

    `nodes` has the members by host.
    """
    me, local_peers = ch.rank, _without(nodes.local_peers(ch.rank), ch.rank)
    relays, relayed = nodes.relays(me), nodes.relayed(me)
    longest = max(out.numel() for out in outs)
    slots = _Slots(ch, x, 1 + max(len(nodes.relayed(m)) for m in range(ch.size)), longest)
    outs[me].copy_(x)
    yield from slots.window.open()
    shown: list[int] = []
    passed: list[int] = []
    for turn in range(slots.count + DEPTH + 1):
        if turn < slots.count:
            if turn >= NUM_SLOTS:  # local peers have copied it, relays have published it
                yield from slots.window.reached(local_peers, shown[turn - NUM_SLOTS + DEPTH + 2])
                yield from slots.window.reached(relays, passed[turn - NUM_SLOTS])
            part = slots.part(x, turn)
            slots.row(me, turn, 0, part.numel()).copy_(part)
            rows = dict.fromkeys((*local_peers, *relays), (0, part.numel()))
            shown.append(slots.publish((*local_peers, *relays), turn, rows))
        j = turn - DEPTH
        if 0 <= j < slots.count:
            yield from slots.window.reached(relayed, shown[j])
            for row, member in enumerate(relayed, 1):
                part = slots.part(outs[member], j)
                part.copy_(slots.row(member, j, 0, part.numel()))
                slots.row(me, j, row, part.numel()).copy_(part)
            passed.append(slots.publish((*local_peers, *relayed), j))
        j -= 1
        if j >= 0:
            yield from slots.window.reached(local_peers, passed[j])
            for peer in local_peers:
                part = slots.part(outs[peer], j)
                part.copy_(slots.row(peer, j, 0, part.numel()))
                for row, member in enumerate(nodes.relayed(peer), 1):
                    part = slots.part(outs[member], j)
                    part.copy_(slots.row(peer, j, row, part.numel()))
    yield from slots.window.close()


def reduce_scatter(
    ch: Channel,
    out: torch.Tensor,
    x: torch.Tensor,
    offsets: Sequence[int],
    op: str,
    scale: float | None,
    *,
    nodes: NodeMap,
) -> Steps:
    """Reduce elements `offsets[r]` to `offsets[r + 1]` of all members' `x` into `out` of rank r.

    `op` is the reduction, `scale` a factor for the result, and `nodes` has the members by host.
    """
    me, n = ch.rank, ch.size
    own_host = nodes.local_peers(me)
    local_peers, relayed = _without(own_host, me), nodes.relayed(me)
    sizes = [offsets[r + 1] - offsets[r] for r in range(n)]
    most = max(len(nodes.relayed(m)) for m in range(n))
    slots = _Slots(ch, x, n + 1 + most, max(sizes))  # parts of all ranks | sum | sums for others
    parts = [x[offsets[r] : offsets[r + 1]] for r in range(n)]
    summers = [me if me in host else nodes.relay(me, host[0]) for host in nodes.hosts]
    others = [m for m in summers if m != me]
    step, factor = "sum" if op == "avg" else op, early_factor(x.dtype, op, scale, n)
    yield from slots.window.open()
    shown: list[int] = []
    summed: list[int] = []
    ended: list[int] = []
    for turn in range(slots.count + DEPTH + 1):
        if turn < slots.count:
            if turn >= NUM_SLOTS:  # local peers have summed it
                yield from slots.window.reached(local_peers, shown[turn - NUM_SLOTS + 2])
            for r in range(n) if local_peers else ():
                part = slots.part(parts[r], turn)
                slots.row(me, turn, r, part.numel()).copy_(part)
            shown.append(slots.publish(local_peers, turn))
        j = turn - 1
        if 0 <= j < slots.count:
            if j >= NUM_SLOTS:  # owners have added it
                yield from slots.window.reached(relayed, ended[j - NUM_SLOTS])
            yield from slots.window.reached(local_peers, shown[j])
            rows = {}
            for row, owner in enumerate((me, *relayed), n):
                part = slots.part(parts[owner], j)
                sources = [
                    part if m == me else slots.row(m, j, owner, part.numel()) for m in own_host
                ]
                combine(sources, slots.row(me, j, row, part.numel()), step, factor)
                rows[owner] = (row, part.numel())
            rows.pop(me)
            summed.append(slots.publish(relayed, j, rows))
        j -= DEPTH
        if j >= 0:
            yield from slots.window.reached(others, summed[j])
            part = slots.part(out, j)
            sources = []
            for summer in summers:
                row = n if summer == me else n + 1 + nodes.relayed(summer).index(me)
                sources.append(slots.row(summer, j, row, part.numel()))
            combine(sources, part, step, None)
            if factor is None:
                finish(part, op, n, scale)
            ended.append(slots.publish(others, j))
    yield from slots.window.close()


def _without(members: Sequence[int], me: int) -> tuple[int, ...]:
    return tuple(m for m in members if m != me)
