"""All-reduce: every rank ends with the sum of all ranks' tensors, the same bits everywhere.

Four algorithms sum in the order of ranks, so their results are equal (n = ranks, l = bytes of the
tensor, a = one synchronisation, b = one byte):

    direct       copy into a slot, wait, add the slots of all ranks  a + (n+1) l b
    two_phase    reduce-scatter and all-gather through the slots  2a + (3 + 1/n) l b
    pulled       rank r sums slice r of all tensors, which the kernel copies out of private
                 memory, then fetches the other slices            3a + (2 (n-1)/n + 1) l b
    registered   tensors are in the arena already: no copies. An idle member sums the next
                 block of all tensors, and writes it into every rank's tensor while it is in
                 the cache                                         2a + 2 l b

    registered, two ranks    rank 0's tensor   [ block 0 | block 1 | block 2 | block 3 ]
                             rank 1's tensor   [ block 0 | block 1 | block 2 | block 3 ]
                                                 ^ rank 0  ^ rank 1 sums and stores both

Blocks are assigned dynamically (`work_counter`). When ranks arrive at different times, or share
their core with other processes, the rank that is running does the work. The result does not depend
on which rank summed a block.

`direct` has the fewest synchronisations, and is best for little data or two ranks. `two_phase` has
each rank add only 1/n of the data. `pulled` avoids the copies into the slots, the largest cost once
the data exceeds the cache. `registered` needs registered tensors on all ranks, which the ranks
check in the first step. `selection` holds the measured costs.

Worked example: ranks hold (2, 4, 6), (1, 2, 3) and (4, 8, 12); all end with (7, 14, 21).

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005), sec. 4.5, for the two phases. `registered` is the same algorithm without messages, since all
ranks can read all tensors.
"""

from __future__ import annotations

import torch

from braid.comm.channel.channel import Channel
from braid.comm.channel.peer_tensor import all_registered, offers, remote_of
from braid.comm.channel.staging import pieces
from braid.comm.tensors.reduction import combine
from braid.errors import ConfigError
from braid.runtime.transport import Steps

__all__ = [
    "ALGORITHMS",
    "all_reduce",
    "direct",
    "offers_first",
    "pulled",
    "registered",
    "two_phase",
]

BLOCK_BYTES = 256 << 10  # a sum of this size is still in the second-level cache when it is stored
# from this size on, one synchronisation to compare registrations costs less than a copy
LARGE_BYTES = 32 << 10


def all_reduce(
    ch: Channel,
    x: torch.Tensor,
    op: str,
    scale: float | None = None,
    *,
    algorithm: str = "direct",
    forced: bool = False,
) -> Steps:
    """Return the steps that reduce the flat tensor `x` over all members, in place.

    Args:
        ch: Channel of the group.
        x: Flat, contiguous tensor.
        op: Reduction.
        scale: Factor for the result.
        algorithm: Name of the algorithm: direct, two_phase, pulled or registered.
        forced: Whether to use `algorithm` even if all tensors are registered.
    """
    if offers_first(ch, x, algorithm, forced=forced):
        return _offered(ch, x, op, scale, algorithm=algorithm, forced=forced)
    return ALGORITHMS[algorithm](ch, x, op, scale)


def _offered(
    ch: Channel,
    x: torch.Tensor,
    op: str,
    scale: float | None,
    *,
    algorithm: str,
    forced: bool,
) -> Steps:
    """Publish the tensors' addresses, then reduce in place if every member can read all tensors."""
    private = algorithm == "pulled"
    ch.own.expose(x, private=private)
    yield from ch.publish_and_wait(pausing=True)
    if not x.numel():  # an empty tensor has no address
        return
    if algorithm == "registered":
        _require_offers(ch)
    if not (forced and private) and all_registered(ch):
        algorithm = "registered"
    yield from ALGORITHMS[algorithm](ch, x, op, scale)


def offers_first(ch: Channel, x: torch.Tensor, algorithm: str, *, forced: bool) -> bool:
    """Return whether the first step of `all_reduce` only publishes the address of `x`."""
    if algorithm in {"pulled", "registered"}:
        return True
    return not forced and ch.shares and x.numel() * x.element_size() >= LARGE_BYTES


def direct(ch: Channel, x: torch.Tensor, op: str, scale: float | None) -> Steps:
    """Copy `x` into this rank's shared-memory slot, then add all ranks' slots in rank order.

    Takes one synchronisation per chunk. For the arguments see `all_reduce`.
    """
    for part in pieces(x, ch.chunk_bytes):
        staged = ch.own.stage(part)
        yield from ch.publish_and_wait()
        sources = ch.tensors(staged)
        if ch.rank < 2:
            sources[ch.rank] = part  # hot in the cache, and `combine` may write to it
        combine(sources, part, op, scale)


def two_phase(ch: Channel, x: torch.Tensor, op: str, scale: float | None) -> Steps:
    """Reduce-scatter and all-gather through the shared-memory slots of the ranks.

    Each rank sums one slice of all slots, then copies the other sums; two steps per chunk.
    For the arguments see `all_reduce`.
    """
    for part in pieces(x, ch.chunk_bytes * ch.size // 2):
        numel, dtype = part.numel(), part.dtype
        bounds = [numel * r // ch.size for r in range(ch.size + 1)]
        low, high = bounds[ch.rank], bounds[ch.rank + 1]
        ch.own.stage(part)
        ch.own.send_ranges(bounds, dtype)
        yield from ch.publish_and_wait()
        sources = [tensor[low:high] for tensor in ch.tensors(part)]
        result = ch.own.slot(high - low, dtype)
        combine(sources, result, op, scale)
        part[low:high].copy_(result)
        yield from ch.publish_and_wait()
        for peer in ch.successors:
            start, end = bounds[peer], bounds[peer + 1]
            part[start:end].copy_(ch.peek(peer, end - start, dtype))


def registered(ch: Channel, x: torch.Tensor, op: str, scale: float | None) -> Steps:
    """Sum in place: all members' tensors are in shared memory, at addresses published before.

    Each member sums blocks and writes each sum into all members' tensors. For the
    arguments see `all_reduce`.
    """
    numel, dtype = x.numel(), x.dtype
    tensors = ch.tensors(x)
    step = max(1, min(BLOCK_BYTES // x.element_size(), -(-numel // ch.size)))
    scratch = ch.own.scratch(step, dtype) if ch.size > 2 else None
    yield from ch.require_members()
    for number in ch.work_counter.blocks(-(-numel // step)):
        blocks = [t[number * step : (number + 1) * step] for t in tensors]
        out = blocks[ch.rank] if scratch is None else scratch[: blocks[0].numel()]
        combine(blocks, out, op, scale)
        for block in blocks:
            if block is not out:
                block.copy_(out)
    yield from ch.publish_and_wait()  # all members have stored into this tensor


def pulled(ch: Channel, x: torch.Tensor, op: str, scale: float | None) -> Steps:
    """Sum one slice of all ranks' tensors, then copy the other slices from the other ranks.

    Tensors may be in private memory, from which the kernel copies. For the arguments see
    `all_reduce`.
    """
    numel, dtype, n, me = x.numel(), x.dtype, ch.size, ch.rank
    bounds = [numel * r // n for r in range(n + 1)]
    remotes = {peer: remote_of(ch, peer, numel, dtype) for peer in ch.peers} if numel else {}
    step = max(1, BLOCK_BYTES // x.element_size() // max(1, n - 1))
    scratch = ch.own.scratch(step * n, dtype).view(n, step)
    for start in range(bounds[me], bounds[me + 1], step):
        end = min(start + step, bounds[me + 1])
        block = x[start:end]
        blocks = [block if r == me else remotes[r].block(start, end, scratch[r]) for r in range(n)]
        out = block if me < 2 else scratch[me, : end - start]  # `combine` may write to the first 2
        combine(blocks, out, op, scale)
        if out is not block:
            block.copy_(out)
    yield from ch.publish_and_wait()  # every slice is summed; no rank reads the other slices now
    for peer in ch.successors:
        if bounds[peer] < bounds[peer + 1]:
            remotes[peer].read(bounds[peer], x[bounds[peer] : bounds[peer + 1]])
    yield from ch.publish_and_wait()


def _require_offers(ch: Channel) -> None:
    missing = [rank for rank, block in enumerate(offers(ch)) if not block]
    if missing:
        msg = (
            "algorithm 'registered' needs tensors from Group.empty on all ranks, but the tensors "
            f"of group ranks {missing} are in other memory: leave algorithm out, or allocate "
            "these tensors with empty()"
        )
        raise ConfigError(msg)


ALGORITHMS = {
    "direct": direct,
    "two_phase": two_phase,
    "pulled": pulled,
    "registered": registered,
}
