"""Ring: each rank sends to the next rank, one block at a time.

    round            0            1            2         after p - 1 rounds rank r holds
    rank 0   block 0 >    block 3 >    block 2 >         the sum of block r + 1;
    rank 1   block 1 >    block 0 >    block 3 >
    rank 2   block 2 >    block 1 >    block 0 >         p - 1 more rounds pass the sums on
    rank 3   block 3 >    block 2 >    block 1 >

A cell is the block that a rank sends to the next rank in this round of an all-reduce of 4 ranks. A
reduce_scatter sends other blocks in the same rounds, so that rank r ends with the sum of block r.

Every link is busy in every round. Every rank sends 2 (p-1)/p l bytes, and no all-reduce sends
fewer. But an all-reduce takes 2 (p-1) rounds, which is slow for small messages.

    >>> from braid.programs.schedule.collective.rounds import carried_out
    >>> carried_out(all_reduce(3), [(2, 4, 6), (1, 2, 3), (4, 8, 12)])
    [(7, 14, 21), (7, 14, 21), (7, 14, 21)]

Source: P. Patarasuk, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
JPDC 69 (2009).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from braid.programs.schedule.collective.rounds import Ranks, Round, Rounds
from braid.programs.schedule.program import check_ranks

__all__ = ["all_gather", "all_reduce", "reduce_scatter", "rings"]

Parts = Callable[[int, int], Sequence[int]]


def all_reduce(num_ranks: int) -> Rounds:
    """Return the rounds of an all-reduce: a reduce-scatter, then an all-gather."""
    lane = np.arange(num_ranks)[None, :]
    steps = (*rings(lane, _one_block, adds=True), *rings(lane, _one_block, ahead=1))
    return Rounds("ring", "all_reduce", num_ranks, num_ranks, steps)


def reduce_scatter(num_ranks: int) -> Rounds:
    """Return the rounds of a reduce-scatter: rank r ends with the sum of block r."""
    steps = rings(np.arange(num_ranks)[None, :], _one_block, ahead=-1, adds=True)
    return Rounds("ring", "reduce_scatter", num_ranks, num_ranks, steps)


def all_gather(num_ranks: int) -> Rounds:
    """Return the rounds of an all-gather: every rank ends with all blocks."""
    steps = rings(np.arange(num_ranks)[None, :], _one_block)
    return Rounds("ring", "all_gather", num_ranks, num_ranks, steps)


def rings(lanes: Ranks, parts: Parts, *, ahead: int = 0, adds: bool = False) -> tuple[Round, ...]:
    """Return the rounds of several ring collectives at the same time, over different ranks.

    Args:
        lanes: Ranks of each ring, in order; shape (number of rings, number of ranks of a ring).
        parts: Function that returns the blocks of part i, by (rank, i).
        ahead: Offset of the first part: the rank at position i of a ring begins with part i +
            `ahead`.
        adds: True for a reduce-scatter, after which the rank at position i has the sum of part i +
            1 + `ahead`. False for an all-gather.
    """
    check_ranks(lanes.size)
    length = lanes.shape[1]
    if length == 1:
        return ()
    places = {int(rank): i for lane in lanes for i, rank in enumerate(lane)}

    def slots(rank: int, repetition: int) -> Sequence[int]:
        return parts(rank, (places[rank] + ahead - repetition) % length)

    sources, targets = lanes.ravel(), np.roll(lanes, -1, axis=1).ravel()
    num_blocks = len(parts(int(sources[0]), 0))
    return (Round(sources, targets, num_blocks, slots, adds=adds, repeat=length - 1),)


def _one_block(_rank: int, part: int) -> Sequence[int]:
    return (part,)
