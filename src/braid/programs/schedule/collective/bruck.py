"""Bruck: lg p rounds on any number of ranks, for small messages.

all_gather: in round k a rank sends all its blocks to the rank 2^k before it, so the number of
blocks doubles; the last round sends only the missing blocks.

all_to_all: a block must move d ranks from its sender. In round k it moves 2^k ranks if bit k of d
is set, in one message with all other blocks with that bit set. So a rank sends lg p messages of
about l/2 bytes instead of p-1 messages of l/p bytes.

Source: J. Bruck et al., Efficient algorithms for all-to-all communications in multiport
message-passing systems, IEEE TPDS 8 (1997).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from braid.programs.schedule.collective.rounds import Copy, Round, Rounds
from braid.programs.schedule.program import check_ranks

__all__ = ["all_gather", "all_to_all"]


def all_gather(num_ranks: int) -> Rounds:
    """Return the rounds of Bruck's all-gather: every rank ends with the blocks of all ranks."""
    check_ranks(num_ranks)
    ranks, steps, held = np.arange(num_ranks), [], 1
    while held < num_ranks:
        count = min(held, num_ranks - held)

        def slots(rank: int, _repetition: int, count: int = count) -> Sequence[int]:
            return tuple((rank + i) % num_ranks for i in range(count))

        steps.append(Round(ranks, (ranks - held) % num_ranks, count, slots))
        held += count
    return Rounds("bruck", "all_gather", num_ranks, num_ranks, tuple(steps))


def all_to_all(num_ranks: int) -> Rounds:
    """Return the rounds of Bruck's all-to-all: block j of rank i becomes block i of rank j.

    Blocks in transit are in the second buffer, at index d if their target is d ranks away. A last
    copy sorts them by sender; it needs the first buffer as intermediate memory.
    """
    check_ranks(num_ranks)
    ranks = np.arange(num_ranks)

    def by_distance(rank: int) -> Sequence[tuple[int, int]]:
        return tuple((num_ranks + d, (rank + d) % num_ranks) for d in range(num_ranks))

    def by_sender(rank: int) -> Sequence[tuple[int, int]]:
        return tuple((num_ranks + (rank - d) % num_ranks, num_ranks + d) for d in range(num_ranks))

    steps: list[Round | Copy] = [Copy(by_distance)]
    for k in range((num_ranks - 1).bit_length()):
        blocks = tuple(num_ranks + d for d in range(num_ranks) if d >> k & 1)

        def slots(_rank: int, _repetition: int, blocks: tuple[int, ...] = blocks) -> Sequence[int]:
            return blocks

        steps.append(Round(ranks, (ranks + (1 << k)) % num_ranks, len(blocks), slots))
    steps.append(Copy(by_sender))
    return Rounds("bruck", "all_to_all", num_ranks, 2 * num_ranks, tuple(steps))
