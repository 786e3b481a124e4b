"""Data-moving collectives: broadcast, all-gather, gather, scatter, all-to-all and barrier.

All follow one pattern. Small tensors take one step: data is staged before the description is
published, so the first read of a peer's line finds both. For large tensors, the description is
published first, with the tensor's address if peers can read it there. They can if the tensor is
registered, or if the kernel copies private memory and is faster at this size. If all sources are
readable, peers read them in place, and one more step releases the owners. Otherwise the data goes
through the slots in chunks.

Costs in seconds, with n ranks, l bytes of the largest full buffer of a rank, a seconds per step and
b seconds per byte moved by one rank:

    broadcast        ceil(l / chunk) a + l b        all_gather    ceil(l / (n chunk)) a + l b
    gather, scatter  a more, else like all_gather   all_to_all    ceil(l / chunk) a + 2 l b
    read in place    2 a, and without the copy into the slot

Parts may have different sizes. If all members know all sizes (`all_gather`), the sizes are part of
the description. If only sender and receiver know them, one more step exchanges them (`sizes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from braid.comm.algorithms.sizes import Matrix, agree_on_sizes, offsets_of
from braid.comm.channel.channel import Channel
from braid.comm.channel.peer_tensor import offers, remote_of
from braid.comm.channel.staging import CHUNK_BYTES, pieces
from braid.runtime.transport import Steps

__all__ = [
    "all_gather",
    "all_to_all",
    "barrier",
    "broadcast",
    "chunk_of",
    "gather",
    "scatter",
    "stage_rows",
    "staged_row",
]


def barrier(ch: Channel) -> Steps:
    """Wait until every member has called this.

    Cost: one step.
    """
    yield from ch.publish_and_wait()


def broadcast(ch: Channel, x: torch.Tensor, root: int, *, private: bool = False) -> Steps:
    """Copy `x` of rank `root` into `x` of every member.

    Args:
        ch: Channel of the group.
        x: Flat tensor.
        root: Group rank.
        private: Whether peers may read private memory (all functions of this module take this).
    """
    numel, dtype = x.numel(), x.dtype
    sending = ch.rank == root
    if numel <= chunk_of(CHUNK_BYTES, dtype):
        if sending:
            ch.own.stage(x)
        yield from ch.publish_and_wait()
        if not sending:
            x.copy_(ch.peek(root, numel, dtype))
        return
    if sending:
        ch.own.expose(x, private=private)
    yield from ch.publish_and_wait()
    if offers(ch)[root]:
        if not sending:
            remote_of(ch, root, numel, dtype).read(0, x)
        yield from ch.publish_and_wait()
        return
    for part in pieces(x, CHUNK_BYTES):
        if sending:
            yield from ch.wait_all_read()  # all have read the slot of two steps ago
            ch.own.stage(part)
            ch.publish()
        else:
            value = ch.publish()
            yield from ch.await_step(root, value)
            part.copy_(ch.peek(root, part.numel(), dtype))
    yield from ch.wait_all_read()


def all_gather(
    ch: Channel, outs: Sequence[torch.Tensor], x: torch.Tensor, *, private: bool = False
) -> Steps:
    """Copy `x` of each rank r into `outs[r]`; `private` permits reads of private memory."""
    longest = max(out.numel() for out in outs)
    chunk = chunk_of(CHUNK_BYTES, x.dtype)
    target = outs[ch.rank]
    if ch.shares and longest > chunk:
        ch.own.expose(x, private=private)
        yield from ch.publish_and_wait()
        if all(offer or not out.numel() for offer, out in zip(offers(ch), outs, strict=True)):
            target.copy_(x)
            for peer in ch.successors:
                if outs[peer].numel():
                    remote_of(ch, peer, outs[peer].numel(), x.dtype).read(0, outs[peer])
            yield from ch.publish_and_wait()
            return
    for start in range(0, max(longest, 1), chunk):
        part = x[start : start + chunk]
        ch.own.stage(part)
        # copied to the result while it is in the cache
        yield from ch.publish_and_wait(partial(target[start : start + chunk].copy_, part))
        for peer in ch.successors:
            row = outs[peer][start : start + chunk]
            row.copy_(ch.peek(peer, row.numel(), x.dtype))


def gather(
    ch: Channel,
    outs: Sequence[torch.Tensor],
    x: torch.Tensor,
    root: int,
    *,
    private: bool = False,
) -> Steps:
    """Copy `x` of rank r into `outs[r]` of `root`, which may read private memory if `private`."""
    receiving = ch.rank == root
    sends = [x.numel() if r == root else 0 for r in range(ch.size)]
    expects = [out.numel() for out in outs] if receiving else [0] * ch.size
    sizes = yield from agree_on_sizes(ch, sends, expects)
    if receiving:
        outs[root].copy_(x)
    lengths = [row[root] for row in sizes]
    chunk = chunk_of(CHUNK_BYTES, x.dtype)
    if ch.shares and max(lengths) > chunk:
        ch.own.expose(x, private=private)
        yield from ch.publish_and_wait()
        if all(offers(ch)[r] or not lengths[r] or r == root for r in range(ch.size)):
            for peer in ch.successors if receiving else ():
                if lengths[peer]:
                    remote_of(ch, peer, lengths[peer], x.dtype).read(0, outs[peer])
            yield from ch.publish_and_wait()
            return
    for start in range(0, max(*lengths, 1), chunk):
        if not receiving:
            part = x[start : start + chunk]
            ch.own.stage(part)
            ch.own.send_only_to(root, part.numel(), x.dtype)
        yield from ch.publish_and_wait()
        for peer in ch.successors if receiving else ():
            row = outs[peer][start : start + chunk]
            row.copy_(ch.peek(peer, row.numel(), x.dtype))


def scatter(
    ch: Channel,
    out: torch.Tensor,
    x: torch.Tensor,
    widths: Sequence[int],
    root: int,
    *,
    private: bool = False,
) -> Steps:
    """Copy part r of the root's `x`, of `widths[r]` elements, into `out` of rank r.

    `private` permits reads of private memory.
    """
    sending = ch.rank == root
    sends = list(widths) if sending else [0] * ch.size
    expects = [out.numel() if r == root else 0 for r in range(ch.size)]
    sizes = yield from agree_on_sizes(ch, sends, expects)
    offsets = offsets_of(sizes[root])
    if sending:
        out.copy_(x[offsets[root] : offsets[root + 1]])
    chunk = chunk_of(CHUNK_BYTES // ch.size, out.dtype)
    longest = max(sizes[root])
    if ch.shares and longest > chunk:
        if sending:
            ch.own.expose(x, private=private)
        yield from ch.publish_and_wait()
        if offers(ch)[root]:
            if not sending and out.numel():
                remote_of(ch, root, offsets[-1], out.dtype).read(offsets[ch.rank], out)
            yield from ch.publish_and_wait()
            return
    for start in range(0, max(longest, 1), chunk):
        stride = min(chunk, longest - start)
        if sending:
            stage_rows(ch, x, offsets, start, stride)
        yield from ch.publish_and_wait()
        if not sending:
            row = out[start : start + stride]
            row.copy_(staged_row(ch, root, row.numel(), stride, out.dtype))


def all_to_all(
    ch: Channel,
    outs: Sequence[torch.Tensor],
    x: torch.Tensor,
    widths: Sequence[int] | None,
    *,
    private: bool = False,
) -> Steps:
    """Copy part `rank` of the flat tensor `x` of each rank r into `outs[r]`.

    Args:
        ch: Channel of the group.
        outs: One flat tensor per member.
        x: All parts, concatenated.
        widths: Number of elements of each part; None if all parts of all members are equal.
        private: Whether peers may read private memory.
    """
    sizes: Matrix
    if widths is None:
        sizes = [[x.numel() // ch.size] * ch.size] * ch.size
    else:
        sizes = yield from agree_on_sizes(ch, widths, [out.numel() for out in outs])
    offsets = [offsets_of(row) for row in sizes]
    me = ch.rank
    kept = x[offsets[me][me] : offsets[me][me + 1]]
    chunk = chunk_of(CHUNK_BYTES // ch.size, x.dtype)
    longest = max(max(row) for row in sizes)
    if ch.shares and longest > chunk:
        ch.own.expose(x, private=private)
        yield from ch.publish_and_wait()
        if all(offer or not ends[-1] for offer, ends in zip(offers(ch), offsets, strict=True)):
            outs[me].copy_(kept)
            for peer in ch.successors:
                if outs[peer].numel():
                    remote = remote_of(ch, peer, offsets[peer][-1], x.dtype)
                    remote.read(offsets[peer][me], outs[peer])
            yield from ch.publish_and_wait()
            return
    for start in range(0, max(longest, 1), chunk):
        stride = min(chunk, longest - start)
        stage_rows(ch, x, offsets[me], start, stride)
        end = start + stride
        yield from ch.publish_and_wait(partial(outs[me][start:end].copy_, kept[start:end]))
        for peer in ch.successors:
            row = outs[peer][start : start + stride]
            row.copy_(staged_row(ch, peer, row.numel(), stride, x.dtype))


def chunk_of(nbytes: int, dtype: torch.dtype) -> int:
    """Return the number of elements of `dtype` that fit into `nbytes`."""
    return max(1, nbytes // dtype.itemsize)


def stage_rows(
    ch: Channel, x: torch.Tensor, offsets: Sequence[int], start: int, stride: int
) -> None:
    """Copy elements `start` to `start + stride` of each part of `x` to shared memory.

    Part r begins at element `offsets[r]` of `x`.
    """
    slot = ch.own.slot(stride * ch.size, x.dtype)
    for peer in ch.peers:
        low = offsets[peer] + start
        numel = max(0, min(stride, offsets[peer + 1] - low))
        slot[peer * stride : peer * stride + numel].copy_(x[low : low + numel])
    ch.own.send_ranges([r * stride for r in range(ch.size + 1)], x.dtype)


def staged_row(ch: Channel, peer: int, numel: int, stride: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements that `peer` has copied for this rank by `stage_rows`."""
    low = ch.rank * stride
    return ch.peek(peer, stride * ch.size, dtype)[low : low + numel]
