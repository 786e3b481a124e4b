"""One to all: one rank sends to all other ranks in sequence, a baseline for other algorithms.

One rank sends p-1 messages of the whole buffer in a broadcast, and receives p-1 messages in a
reduce. Each of the two takes (p-1)(a + b l) seconds without the additions, if a message takes a
seconds and b seconds per byte.

    >>> from braid.programs.schedule.collective.rounds import carried_out
    >>> carried_out(all_reduce(3), [(2, 4, 6), (1, 2, 3), (4, 8, 12)])
    [(7, 14, 21), (7, 14, 21), (7, 14, 21)]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from braid.programs.schedule.collective.rounds import Round, Rounds
from braid.programs.schedule.program import check_ranks

__all__ = ["all_gather", "all_reduce", "broadcast", "gather", "reduce", "scatter"]


def broadcast(num_ranks: int, root: int = 0) -> Rounds:
    """Return the rounds of a broadcast in which the root sends its buffer to all ranks."""
    return Rounds("naive", "broadcast", num_ranks, 1, _out(num_ranks, root), root)


def reduce(num_ranks: int, root: int = 0) -> Rounds:
    """Return the rounds of a reduce in which the root receives and adds up all buffers."""
    return Rounds("naive", "reduce", num_ranks, 1, _in(num_ranks, root, adds=True), root)


def all_reduce(num_ranks: int) -> Rounds:
    """Return the rounds of an all-reduce: a reduce to rank 0, then a broadcast from rank 0."""
    steps = (*_in(num_ranks, 0, adds=True), *_out(num_ranks, 0))
    return Rounds("naive", "all_reduce", num_ranks, 1, steps)


def gather(num_ranks: int, root: int = 0) -> Rounds:
    """Return the rounds of a gather in which all ranks send their block to the root."""
    steps = _in(num_ranks, root, by_rank=True)
    return Rounds("naive", "gather", num_ranks, num_ranks, steps, root)


def scatter(num_ranks: int, root: int = 0) -> Rounds:
    """Return the rounds of a scatter in which the root sends one block to each rank."""
    steps = _out(num_ranks, root, by_rank=True)
    return Rounds("naive", "scatter", num_ranks, num_ranks, steps, root)


def all_gather(num_ranks: int) -> Rounds:
    """Return the rounds of an all-gather: rank 0 gathers all blocks, and broadcasts them."""

    def whole(_rank: int, _repetition: int) -> Sequence[int]:
        return range(num_ranks)

    out = [step._replace(num_blocks=num_ranks, slots=whole) for step in _out(num_ranks, 0)]
    steps = (*_in(num_ranks, 0, by_rank=True), *out)
    return Rounds("naive", "all_gather", num_ranks, num_ranks, steps)


def _others(num_ranks: int, root: int) -> list[int]:
    check_ranks(num_ranks)
    return [(root + i) % num_ranks for i in range(1, num_ranks)]


def _out(num_ranks: int, root: int, *, by_rank: bool = False) -> tuple[Round, ...]:
    return tuple(_message(root, r, r if by_rank else 0) for r in _others(num_ranks, root))


def _in(
    num_ranks: int, root: int, *, adds: bool = False, by_rank: bool = False
) -> tuple[Round, ...]:
    others = _others(num_ranks, root)
    return tuple(_message(r, root, r if by_rank else 0, adds=adds) for r in others)


def _message(source: int, target: int, block: int, *, adds: bool = False) -> Round:
    def slots(_rank: int, _repetition: int) -> Sequence[int]:
        return (block,)

    return Round(np.array([source]), np.array([target]), 1, slots, adds=adds)
