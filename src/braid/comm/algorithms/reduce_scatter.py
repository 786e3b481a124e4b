"""Reductions with a different result on each rank: reduce-scatter, reduce and scan.

    reduce_scatter   rank r gets part r of the sum        staged ceil(l / chunk) a + 2 l b
                                                          in place 2 a + l b
    reduce           the root gets the sum                small a + n l b on the root
                                                          large 2 a + 2 l b (each rank sums 1/n)
    scan             rank r gets the sum of ranks 0..r    ceil(l / chunk) a + (r + 2) l b

Sums are in the order of ranks, as in `all_reduce`.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005), sec. 4.3, 4.4; Blelloch, "Prefix Sums and Their Applications" (1990), for scan. In shared
memory, every rank computes its own result from all tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from braid.comm.algorithms.broadcast_gather import chunk_of, stage_rows, staged_row
from braid.comm.channel.channel import Channel
from braid.comm.channel.peer_tensor import Remote, offers, remote_of
from braid.comm.channel.staging import CHUNK_BYTES, pieces
from braid.comm.tensors.reduction import combine, identity
from braid.runtime.transport import Steps

__all__ = ["reduce", "reduce_scatter", "scan"]


def reduce_scatter(
    ch: Channel,
    out: torch.Tensor,
    x: torch.Tensor,
    offsets: Sequence[int],
    op: str,
    scale: float | None = None,
    *,
    private: bool = False,
) -> Steps:
    """Reduce part `rank` of the flat `x` of all members into `out`.

    Args:
        ch: Channel of the group.
        out: Flat tensor.
        x: All parts, concatenated.
        offsets: First element of each part, and the end of the last; the same on all members.
        op: Reduction.
        scale: Factor for the result.
        private: Whether peers may read private memory.
    """
    me = ch.rank
    chunk = chunk_of(CHUNK_BYTES // ch.size, x.dtype)
    longest = max(high - low for low, high in pairwise(offsets))
    if ch.shares and longest > chunk:
        ch.own.expose(x, private=private)
        yield from ch.publish_and_wait()
        if all(offers(ch)):
            remotes = _remotes(ch, x)
            _sum_slice(ch, x, remotes, offsets[me], out, op=op, scale=scale)
            yield from ch.publish_and_wait()
            return
    mine = x[offsets[me] : offsets[me + 1]]
    for start in range(0, max(longest, 1), chunk):
        stride = min(chunk, longest - start)
        stage_rows(ch, x, offsets, start, stride)
        yield from ch.publish_and_wait()
        part = mine[start : start + stride]
        numel = part.numel()
        rows = [
            part if r == me else staged_row(ch, r, numel, stride, x.dtype) for r in range(ch.size)
        ]
        combine(rows, out[start : start + stride], op, scale)


def reduce(
    ch: Channel, out: torch.Tensor, x: torch.Tensor, op: str, root: int, *, private: bool = False
) -> Steps:
    """Reduce `x` of all members into `out` of rank `root`; `out` may be its `x`.

    `private` permits reads of private memory.
    """
    numel, dtype, n, me = x.numel(), x.dtype, ch.size, ch.rank
    if numel <= chunk_of(CHUNK_BYTES, dtype) // 2:
        ch.own.stage(x)
        ch.own.send_only_to(root, numel, dtype)
        yield from ch.publish_and_wait()
        if me == root:
            rows = [x if r == me else ch.peek(r, numel, dtype) for r in range(n)]
            _combine_into(ch, rows, out, op)
        return
    if ch.shares:
        ch.own.expose(x, private=private)
        yield from ch.publish_and_wait()
        if all(offers(ch)):
            yield from _reduce_part(ch, out, x, _remotes(ch, x), op, root)
            return
    for part, target in zip(pieces(x, CHUNK_BYTES), pieces(out, CHUNK_BYTES), strict=True):
        count = part.numel()
        bounds = [count * r // n for r in range(n + 1)]
        ch.own.stage(part)
        ch.own.send_ranges(bounds, dtype)
        yield from ch.publish_and_wait()
        low, high = bounds[me], bounds[me + 1]
        rows = [(part if r == me else ch.peek(r, count, dtype))[low:high] for r in range(n)]
        result = ch.own.slot(high - low, dtype)
        combine(rows, result, op, None)
        ch.own.send_only_to(root, high - low, dtype)
        yield from ch.publish_and_wait()
        if me == root:
            _collect(ch, target, result, bounds)


def scan(
    ch: Channel, out: torch.Tensor, x: torch.Tensor, op: str, *, exclusive: bool = False
) -> Steps:
    """Reduce `x` of ranks 0 to `rank`, or to `rank - 1` if `exclusive`, into `out`."""
    last = ch.rank if exclusive else ch.rank + 1
    for part, target in zip(pieces(x, CHUNK_BYTES), pieces(out, CHUNK_BYTES), strict=True):
        ch.own.stage(part)
        yield from ch.publish_and_wait()
        numel, dtype = part.numel(), part.dtype
        rows = [part if r == ch.rank else ch.peek(r, numel, dtype) for r in range(last)]
        if rows:
            combine(rows, target, op, None)
        else:
            target.copy_(identity(op, target))


def _reduce_part(
    ch: Channel,
    out: torch.Tensor,
    x: torch.Tensor,
    remotes: dict[int, Remote],
    op: str,
    root: int,
) -> Steps:
    """Sum 1/n of all exposed tensors into this rank's slot; the root collects the slots."""
    n, me = ch.size, ch.rank
    bounds = [x.numel() * r // n for r in range(n + 1)]
    result = ch.own.slot(bounds[me + 1] - bounds[me], x.dtype)
    _sum_slice(ch, x, remotes, bounds[me], result, op=op, scale=None)
    yield from ch.publish_and_wait()
    if me == root:
        _collect(ch, out, result, bounds)


def _collect(ch: Channel, out: torch.Tensor, result: torch.Tensor, bounds: Sequence[int]) -> None:
    for r in range(ch.size):
        low, high = bounds[r], bounds[r + 1]
        out[low:high].copy_(result if r == ch.rank else ch.peek(r, high - low, out.dtype))


def _sum_slice(
    ch: Channel,
    x: torch.Tensor,
    remotes: dict[int, Remote],
    low: int,
    out: torch.Tensor,
    *,
    op: str,
    scale: float | None,
) -> None:
    """Reduce a slice of all exposed tensors into `out`, block by block."""
    n, me = ch.size, ch.rank
    step = chunk_of(CHUNK_BYTES // max(1, n - 1), x.dtype)
    scratch = ch.own.scratch(step * n, x.dtype).view(n, step)
    for start in range(low, low + out.numel(), step):
        end = min(start + step, low + out.numel())
        blocks = [
            x[start:end] if r == me else remotes[r].block(start, end, scratch[r]) for r in range(n)
        ]
        combine(blocks, out[start - low : end - low], op, scale)


def _combine_into(ch: Channel, rows: list[torch.Tensor], out: torch.Tensor, op: str) -> None:
    """Combine `rows` into `out`, which may be one of the rows."""
    me = ch.rank
    if me >= 2 and out.data_ptr() == rows[me].data_ptr():
        wide = ch.own.scratch(out.numel(), out.dtype)
        combine(rows, wide, op, None)
        out.copy_(wide)
    else:
        combine(rows, out, op, None)


def _remotes(ch: Channel, x: torch.Tensor) -> dict[int, Remote]:
    return {peer: remote_of(ch, peer, x.numel(), x.dtype) for peer in ch.peers}
