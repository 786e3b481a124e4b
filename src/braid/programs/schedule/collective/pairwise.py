"""Pairwise: in round i rank r sends directly to rank r + i, counted modulo p.

There are p-1 rounds, and each byte is sent once. For an all_to_all of large messages, no algorithm
sends fewer bytes. reduce_scatter and all_gather send the same bytes as a ring: no rank forwards
data, but messages go to distant ranks.

Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in
MPICH, IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from braid.programs.schedule.collective.rounds import Copy, Round, Rounds
from braid.programs.schedule.program import check_ranks

__all__ = ["all_gather", "all_to_all", "reduce_scatter"]


def all_to_all(num_ranks: int) -> Rounds:
    """Return the rounds of an all-to-all: block j of rank i becomes block i of rank j."""

    def keep(rank: int) -> Sequence[tuple[int, int]]:
        return ((num_ranks + rank, rank),)

    steps = [_round(num_ranks, i, "all_to_all") for i in range(1, num_ranks)]
    return Rounds("pairwise", "all_to_all", num_ranks, 2 * num_ranks, (Copy(keep), *steps))


def reduce_scatter(num_ranks: int) -> Rounds:
    """Return the rounds of a reduce-scatter: every block goes straight to the rank that sums it."""
    check_ranks(num_ranks)
    steps = tuple(_round(num_ranks, i, "reduce_scatter") for i in range(1, num_ranks))
    return Rounds("pairwise", "reduce_scatter", num_ranks, num_ranks, steps)


def all_gather(num_ranks: int) -> Rounds:
    """Return the rounds of an all-gather: each rank sends its block to every other rank."""
    check_ranks(num_ranks)
    steps = tuple(_round(num_ranks, i, "all_gather") for i in range(1, num_ranks))
    return Rounds("pairwise", "all_gather", num_ranks, num_ranks, steps)


def _round(num_ranks: int, distance: int, operation: str) -> Round:
    def own(rank: int, _repetition: int) -> Sequence[int]:
        return (rank,)

    def of_target(rank: int, _repetition: int) -> Sequence[int]:
        return ((rank + distance) % num_ranks,)

    def second_buffer(rank: int, _repetition: int) -> Sequence[int]:
        return (num_ranks + rank,)

    ranks = np.arange(num_ranks)
    slots = own if operation == "all_gather" else of_target
    into = second_buffer if operation == "all_to_all" else None
    adds = operation == "reduce_scatter"
    return Round(ranks, (ranks + distance) % num_ranks, 1, slots, into, adds=adds)
