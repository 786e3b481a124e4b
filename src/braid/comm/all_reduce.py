"""All-reduce: every rank ends with the sum of all ranks' tensors, the same bits everywhere.

Three ways, all exact to the order of ranks (n = ranks, l = bytes of the tensor, a = one synchronisation):

    direct       copy in, wait, add everybody's slot                      a        + (n+1) l b
    two_phase    reduce-scatter and all-gather through the slots         2a        + (3 + 1/n) l b
    registered   tensors already lie in the arena: no copy in, no copy out
                 rank r sums slice r of everybody, block by block, and writes each block into every rank's
                 tensor while it is hot                                   2a        + 2 l b

    registered, two ranks         rank 0's tensor   [ slice 0 | slice 1 ]
                                  rank 1's tensor   [ slice 0 | slice 1 ]
                                                      ^ rank 0   ^ rank 1 sums and stores both

Which one: `direct` has the fewest synchronisations and is best for little data or two ranks; `two_phase` lets each rank
add only 1/n of the data; `registered` needs all ranks to have registered their tensors, which they see in the first step.

Worked example: ranks hold (2, 4, 6), (1, 2, 3) and (4, 8, 12); all end with (7, 14, 21).

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), sec. 4.5, for
the two phases; the registered form is theirs with the messages taken out, since all ranks see all tensors.
"""

from __future__ import annotations

import torch

from braid.comm.channel import Channel, pieces
from braid.comm.reduction import combine
from braid.errors import ConfigError
from braid.transport import Steps

__all__ = ["ALGORITHMS", "all_reduce", "direct", "registered", "two_phase"]

CHUNK_BYTES = 256 << 10  # a slot and its reader fit into the second-level cache
BLOCK_BYTES = 256 << 10  # likewise, for the block that is summed and stored while hot
LARGE_BYTES = 32 << 10  # from here a synchronisation costs less than a copy
DIRECT_MANY_BYTES = 64 << 10  # more than two ranks: from here adding 1/n beats one synchronisation


def all_reduce(
    ch: Channel, x: torch.Tensor, op: str, scale: float | None = None, algorithm: str | None = None
) -> Steps:
    """Reduce the flat tensor `x` over all members, in place.

    Args:
        ch: Channel of the group.
        x: Flat and contiguous.
        op: Reduction.
        scale: Factor for the result.
        algorithm: Name in `ALGORITHMS`, None to choose by size and registration.
    """
    nbytes = x.numel() * x.element_size()
    if algorithm is None and nbytes >= LARGE_BYTES:
        ch.offer(x)
        yield from ch.exchange()
        if all(ch.offers()):
            yield from registered(ch, x, op, scale)
            return
    if algorithm is None:
        algorithm = "direct" if ch.size <= 2 or nbytes <= DIRECT_MANY_BYTES else "two_phase"
    if algorithm == "registered":
        ch.offer(x)
        yield from ch.exchange()
        _require_offers(ch)
    yield from ALGORITHMS[algorithm](ch, x, op, scale)


def direct(ch: Channel, x: torch.Tensor, op: str, scale: float | None) -> Steps:
    """Copy in, wait, add everybody's slot in the order of ranks; one synchronisation per chunk."""
    for part in pieces(x, CHUNK_BYTES):
        ch.stage(part)
        own = ch.room(part.numel(), part.dtype)
        yield from ch.exchange()
        numel, dtype = part.numel(), part.dtype
        sources = [own if r == ch.rank else ch.peek(r, numel, dtype) for r in range(ch.size)]
        if ch.rank < 2:
            sources[ch.rank] = part  # hot in the cache, and `combine` may write to it
        combine(sources, part, op, scale)


def two_phase(ch: Channel, x: torch.Tensor, op: str, scale: float | None) -> Steps:
    """Each rank sums its slice of everybody's slot, then fetches the other slices; two steps per chunk."""
    for part in pieces(x, CHUNK_BYTES * ch.size // 2):
        numel, dtype = part.numel(), part.dtype
        bounds = [numel * r // ch.size for r in range(ch.size + 1)]
        low, high = bounds[ch.rank], bounds[ch.rank + 1]
        ch.stage(part)
        yield from ch.exchange()
        sources = [
            (part if r == ch.rank else ch.peek(r, numel, dtype))[low:high] for r in range(ch.size)
        ]
        result = ch.room(high - low, dtype)
        combine(sources, result, op, scale)
        part[low:high].copy_(result)
        yield from ch.exchange()
        for distance in range(1, ch.size):
            peer = (ch.rank + distance) % ch.size
            start, end = bounds[peer], bounds[peer + 1]
            part[start:end].copy_(ch.peek(peer, end - start, dtype))


def registered(ch: Channel, x: torch.Tensor, op: str, scale: float | None) -> Steps:
    """Sum in the tensors themselves; the offers have just been exchanged, and all members made one."""
    numel, dtype = x.numel(), x.dtype
    tensors = [x if r == ch.rank else ch.peek(r, numel, dtype) for r in range(ch.size)]
    low, high = numel * ch.rank // ch.size, numel * (ch.rank + 1) // ch.size
    step = max(1, BLOCK_BYTES // x.element_size())
    scratch = ch.scratch(min(step, high - low), dtype) if ch.size > 2 else None
    for start in range(low, high, step):
        end = min(start + step, high)
        blocks = [t[start:end] for t in tensors]
        out = blocks[ch.rank] if scratch is None else scratch[: end - start]
        combine(blocks, out, op, scale)
        for block in blocks:
            if block is not out:
                block.copy_(out)
    yield from ch.exchange()  # nobody may use its tensor before everybody has stored into it


def _require_offers(ch: Channel) -> None:
    missing = [rank for rank, block in enumerate(ch.offers()) if not block]
    if missing:
        msg = (
            "expected tensors from Group.empty on all ranks for algorithm 'registered', found other memory on group "
            f"ranks {missing}: leave algorithm out, or allocate there with empty()"
        )
        raise ConfigError(msg)


ALGORITHMS = {"direct": direct, "two_phase": two_phase, "registered": registered}
