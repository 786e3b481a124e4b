"""All-reduce: every rank ends with the sum of all ranks' tensors, the same bits everywhere.

There are four ways, all exact to the order of ranks (n = ranks, l = bytes of the tensor, a = one
synchronisation):

    direct       copy in, wait, add everybody's slot               a + (n+1) l b
    two_phase    reduce-scatter and all-gather through the slots  2a + (3 + 1/n) l b
    pulled       rank r sums slice r of all tensors, which the kernel copies out of private
                 memory, then fetches the other slices            3a + (2 (n-1)/n + 1) l b
    registered   tensors lie in the arena already: no copies. A member that is free sums the
                 next block of all tensors, and writes it into every rank's tensor while it
                 is in the cache                                  2a + 2 l b

    registered, two ranks    rank 0's tensor   [ block 0 | block 1 | block 2 | block 3 ]
                             rank 1's tensor   [ block 0 | block 1 | block 2 | block 3 ]
                                                 ^ rank 0  ^ rank 1 sums and stores both

Blocks are not dealt out beforehand (`work_counter`). When ranks come at different times, or share
their core with other processes, the rank that has come and is running does the work meanwhile. The
numbers do not tell who summed a block.

`direct` has the fewest synchronisations, and is best for little data or two ranks. `two_phase` lets
each rank add only 1/n of the data. `pulled` saves the copies into the slots, which are the most
expensive ones as soon as the data exceeds the cache. `registered` needs all ranks to have
registered their tensors, which they see in the first step. `selection` holds the measured costs.

Worked example: ranks hold (2, 4, 6), (1, 2, 3) and (4, 8, 12); all end with (7, 14, 21).

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005), sec. 4.5, for the two phases. The registered form is theirs with the messages taken out,
since all ranks see all tensors.
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

BLOCK_BYTES = 256 << 10  # of a sum that is stored while it is in the second-level cache
LARGE_BYTES = (
    32 << 10
)  # from here one synchronisation to learn what is registered costs less than a copy


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
        algorithm: Name in `ALGORITHMS`.
        forced: Whether to use `algorithm` even if all tensors turn out to be registered.
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
    """Tell where the tensors lie, then reduce in place if every member can read all of them."""
    private = algorithm == "pulled"
    ch.own.expose(x, private=private)
    yield from ch.publish_and_wait(pausing=True)
    if not x.numel():  # it lies nowhere
        return
    if algorithm == "registered":
        _require_offers(ch)
    if not (forced and private) and all_registered(ch):
        algorithm = "registered"
    yield from ALGORITHMS[algorithm](ch, x, op, scale)


def offers_first(ch: Channel, x: torch.Tensor, algorithm: str, *, forced: bool) -> bool:
    """Return whether the first step only tells where the tensor lies."""
    if algorithm in {"pulled", "registered"}:
        return True
    return not forced and ch.shares and x.numel() * x.element_size() >= LARGE_BYTES


def direct(ch: Channel, x: torch.Tensor, op: str, scale: float | None) -> Steps:
    """Copy in, wait, and add the slots in the order of ranks; one synchronisation per chunk."""
    for part in pieces(x, ch.chunk_bytes):
        own = ch.own.stage(part)
        yield from ch.publish_and_wait()
        sources = ch.tensors(own)
        if ch.rank < 2:
            sources[ch.rank] = part  # hot in the cache, and `combine` may write to it
        combine(sources, part, op, scale)


def two_phase(ch: Channel, x: torch.Tensor, op: str, scale: float | None) -> Steps:
    """Sum this rank's slice of all slots, then fetch the other slices; two steps per chunk."""
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
    """Sum in the tensors themselves, which all members have just exposed."""
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
    yield from ch.publish_and_wait()  # a tensor may be used when all members have stored into it


def pulled(ch: Channel, x: torch.Tensor, op: str, scale: float | None) -> Steps:
    """Sum a slice of all exposed tensors, wherever they lie, then fetch the other slices."""
    numel, dtype, n, me = x.numel(), x.dtype, ch.size, ch.rank
    bounds = [numel * r // n for r in range(n + 1)]
    remotes = {peer: remote_of(ch, peer, numel, dtype) for peer in ch.peers} if numel else {}
    step = max(1, BLOCK_BYTES // x.element_size() // max(1, n - 1))
    scratch = ch.own.scratch(step * n, dtype).view(n, step)
    for start in range(bounds[me], bounds[me + 1], step):
        end = min(start + step, bounds[me + 1])
        own = x[start:end]
        blocks = [own if r == me else remotes[r].block(start, end, scratch[r]) for r in range(n)]
        out = own if me < 2 else scratch[me, : end - start]  # `combine` may write to the first two
        combine(blocks, out, op, scale)
        if out is not own:
            own.copy_(out)
    yield from ch.publish_and_wait()  # every slice is summed, and nobody reads the others any more
    for peer in ch.successors:
        if bounds[peer] < bounds[peer + 1]:
            remotes[peer].read(bounds[peer], x[bounds[peer] : bounds[peer + 1]])
    yield from ch.publish_and_wait()


def _require_offers(ch: Channel) -> None:
    missing = [rank for rank, block in enumerate(offers(ch)) if not block]
    if missing:
        msg = (
            "algorithm 'registered' needs tensors from Group.empty on all ranks, and those of "
            f"group ranks {missing} lie in other memory: leave algorithm out, or allocate "
            "there with empty()"
        )
        raise ConfigError(msg)


ALGORITHMS = {
    "direct": direct,
    "two_phase": two_phase,
    "pulled": pulled,
    "registered": registered,
}
