"""Broadcast, all-gather, reduce-scatter, all-to-all, barrier: the collectives that move slices.

All follow one pattern. Small messages take one step: data is staged before the description is published, so the first
look at a peer's line finds both. Large ones publish the description first together with the place of the tensor if it
is registered; when all sources are registered, peers read them in place and one more step tells the owners that they
may go on; otherwise the data goes through the slots in chunks.

With n ranks and l = bytes of the largest full buffer of a rank, in seconds, a per step, b per byte moved by one rank:

    broadcast        ceil(l / chunk) a + l b        all_gather    ceil(l / (n chunk)) a + l b
    reduce_scatter   ceil(l / chunk) a + 2 l b      all_to_all    ceil(l / chunk) a + 2 l b
    registered       2 a, and without the copy into the slot

Sums are in the order of ranks, as in `all_reduce`.
"""

from __future__ import annotations

import torch

from braid.comm.channel import Channel, pieces
from braid.comm.reduction import combine
from braid.transport import Steps

__all__ = ["all_gather", "all_to_all", "barrier", "broadcast", "recv", "reduce_scatter", "send"]

CHUNK_BYTES = 256 << 10


def barrier(ch: Channel) -> Steps:
    """Wait until every member has come. Cost: a."""
    yield from ch.exchange()


def broadcast(ch: Channel, x: torch.Tensor, root: int) -> Steps:
    """Copy `x` of `root` into `x` of everybody; `x` is flat."""
    numel, dtype = x.numel(), x.dtype
    chunk = _chunk(CHUNK_BYTES, x)
    sending = ch.rank == root
    if numel <= chunk:
        if sending:
            ch.stage(x)
        yield from ch.exchange()
        if not sending:
            x.copy_(ch.peek(root, numel, dtype))
        return
    if sending:
        ch.offer(x)
    yield from ch.exchange()
    if ch.offers()[root]:
        if not sending:
            x.copy_(ch.peek(root, numel, dtype))
        yield from ch.exchange()
        return
    for part in pieces(x, CHUNK_BYTES):
        if sending:
            yield from ch.settle()  # the slot of two steps ago has been read by all
            ch.stage(part)
            ch.post()
        else:
            value = ch.post()
            yield from ch.await_step(root, value)
            part.copy_(ch.peek(root, part.numel(), dtype))
    yield from ch.settle()


def all_gather(ch: Channel, out: torch.Tensor, x: torch.Tensor) -> Steps:
    """Row r of `out` (n rows) becomes the flat tensor `x` of rank r."""
    numel = x.numel()
    chunk = _chunk(CHUNK_BYTES, x)
    if numel > chunk:
        ch.offer(x)
        yield from ch.exchange()
        if all(ch.offers()):
            out[ch.rank].copy_(x)
            for peer in _round(ch):
                out[peer].copy_(ch.peek(peer, numel, x.dtype))
            yield from ch.exchange()
            return
    out[ch.rank].copy_(x)
    for start in range(0, max(numel, 1), chunk):
        part = x[start : start + chunk]
        ch.stage(part)
        yield from ch.exchange()
        for peer in _round(ch):
            row = out[peer, start : start + chunk]
            row.copy_(ch.peek(peer, part.numel(), x.dtype))


def reduce_scatter(
    ch: Channel, out: torch.Tensor, x: torch.Tensor, op: str, scale: float | None = None
) -> Steps:
    """`out` becomes the reduction of row `rank` of everybody's `x` (n rows)."""
    numel = out.numel()
    chunk = _chunk(CHUNK_BYTES // ch.size, x)
    if numel > chunk:
        ch.offer(x)
        yield from ch.exchange()
        if all(ch.offers()):
            rows = [
                (x if r == ch.rank else ch.peek(r, x.numel(), x.dtype).view_as(x))[ch.rank]
                for r in range(ch.size)
            ]
            for start in range(0, numel, CHUNK_BYTES // x.element_size()):
                part = slice(start, start + CHUNK_BYTES // x.element_size())
                combine([row[part] for row in rows], out[part], op, scale)
            yield from ch.exchange()
            return
    for start in range(0, max(numel, 1), chunk):
        part = slice(start, start + chunk)
        width = out[part].numel()
        _stage_rows(ch, x, part, width)
        yield from ch.exchange()
        rows = _received(ch, x, part, width)
        combine(rows, out[part], op, scale)


def all_to_all(ch: Channel, out: torch.Tensor, x: torch.Tensor) -> Steps:
    """Row r of `out` becomes row `rank` of the `x` of rank r; both have n rows."""
    numel = x.shape[1]
    chunk = _chunk(CHUNK_BYTES // ch.size, x)
    if numel > chunk:
        ch.offer(x)
        yield from ch.exchange()
        if all(ch.offers()):
            out[ch.rank].copy_(x[ch.rank])
            for peer in _round(ch):
                out[peer].copy_(ch.peek(peer, x.numel(), x.dtype).view_as(x)[ch.rank])
            yield from ch.exchange()
            return
    out[ch.rank].copy_(x[ch.rank])
    for start in range(0, max(numel, 1), chunk):
        part = slice(start, start + chunk)
        width = x[ch.rank, part].numel()
        _stage_rows(ch, x, part, width)
        yield from ch.exchange()
        rows = _received(ch, x, part, width)
        for peer in _round(ch):
            out[peer, part].copy_(rows[peer])


def send(ch: Channel, acks: Channel, x: torch.Tensor, to: int) -> Steps:
    """Put `x` chunk by chunk into the slots; two may be under way. `acks` is the receiver's line."""
    for part in pieces(x, CHUNK_BYTES):
        yield from acks.await_step(to, ch.value - 1)
        ch.stage(part)
        ch.post()


def recv(ch: Channel, acks: Channel, x: torch.Tensor, source: int) -> Steps:
    """Take what `source` put into its slots; `acks` is this rank's own line."""
    for part in pieces(x, CHUNK_BYTES):
        value = ch.value = ch.value + 1  # the sender's step: this rank publishes on `acks` only
        yield from ch.await_step(source, value)
        ch.compare(source, value)
        part.copy_(ch.peek(source, part.numel(), x.dtype))
        acks.post()


def _chunk(nbytes: int, x: torch.Tensor) -> int:
    return max(1, nbytes // x.element_size())


def _round(ch: Channel) -> list[int]:
    """The others, each rank beginning with its successor, so that no source is read by all at once."""
    return [(ch.rank + distance) % ch.size for distance in range(1, ch.size)]


def _stage_rows(ch: Channel, x: torch.Tensor, part: slice, width: int) -> None:
    slot = ch.room(width * ch.size, x.dtype).view(ch.size, width)
    for peer in ch.others:
        slot[peer].copy_(x[peer, part])


def _received(ch: Channel, x: torch.Tensor, part: slice, width: int) -> list[torch.Tensor]:
    """What each rank staged for this one; the own row comes from `x` itself."""
    return [
        x[r, part]
        if r == ch.rank
        else ch.peek(r, width * ch.size, x.dtype)[ch.rank * width : (ch.rank + 1) * width]
        for r in range(ch.size)
    ]
