"""Binomial tree: ranks with the data send it, so the number of these ranks doubles in each round.

    round 0      0 ------------------------> 4
    round 1      0 ----------> 2             4 ----------> 6          ranks relative to the root
    round 2      0 --> 1       2 --> 3       4 --> 5       6 --> 7

The picture is a broadcast from the root to 8 ranks. A reduce runs the same rounds in reverse, with
sums. A scatter sends in each message the blocks of a whole subtree, and a gather is the reverse of
a scatter. No algorithm has fewer than lg p rounds, so the tree is fast for small messages. In a
broadcast the root sends its buffer lg p times, which is slow for large messages.

    >>> from braid.programs.schedule.collective.rounds import carried_out
    >>> carried_out(all_reduce(3), [(2, 4, 6), (1, 2, 3), (4, 8, 12)])
    [(7, 14, 21), (7, 14, 21), (7, 14, 21)]

Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in
MPICH, IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from braid.programs.schedule.collective.rounds import Ranks, Round, Rounds
from braid.programs.schedule.program import check_ranks

__all__ = ["all_reduce", "broadcast", "gather", "reduce", "scatter"]


def broadcast(num_ranks: int, root: int = 0) -> Rounds:
    """Return the rounds of a broadcast by a binomial tree, from the root to all ranks."""
    steps = tuple(_down(num_ranks, root))
    return Rounds("tree", "broadcast", num_ranks, 1, steps, root)


def reduce(num_ranks: int, root: int = 0) -> Rounds:
    """Return the rounds of a reduction by a binomial tree, from all ranks to the root."""
    return Rounds("tree", "reduce", num_ranks, 1, tuple(_up(num_ranks, root)), root)


def all_reduce(num_ranks: int) -> Rounds:
    """Return the rounds of an all-reduce: a reduction to rank 0, then a broadcast."""
    steps = (*_up(num_ranks, 0), *_down(num_ranks, 0))
    return Rounds("tree", "all_reduce", num_ranks, 1, steps)


def scatter(num_ranks: int, root: int = 0) -> Rounds:
    """Return the rounds of a scatter; a message carries the root's blocks for a subtree."""
    steps = [_subtree(num_ranks, root, distance) for distance in _distances(num_ranks)]
    return Rounds("tree", "scatter", num_ranks, num_ranks, tuple(steps), root)


def gather(num_ranks: int, root: int = 0) -> Rounds:
    """Return the rounds of a gather: the rounds of `scatter` in reverse."""
    down = scatter(num_ranks, root).steps
    steps = [_backwards(step) for step in reversed(down) if isinstance(step, Round)]
    return Rounds("tree", "gather", num_ranks, num_ranks, tuple(steps), root)


def _distances(num_ranks: int) -> list[int]:
    check_ranks(num_ranks)
    return [1 << i for i in reversed(range((num_ranks - 1).bit_length()))]


def _senders(num_ranks: int, distance: int) -> Ranks:
    """Return the relative ranks that send to the rank `distance` further on."""
    places = np.arange(0, num_ranks, 2 * distance)
    return places[places + distance < num_ranks]


def _down(num_ranks: int, root: int) -> list[Round]:
    rounds = []
    for distance in _distances(num_ranks):
        senders = _senders(num_ranks, distance)
        targets = (senders + distance + root) % num_ranks
        rounds.append(Round((senders + root) % num_ranks, targets, 1, lambda *_: (0,)))
    return rounds


def _up(num_ranks: int, root: int) -> list[Round]:
    down = _down(num_ranks, root)
    return [
        step._replace(sources=step.targets, targets=step.sources, adds=True)
        for step in reversed(down)
    ]


def _subtree(num_ranks: int, root: int, distance: int) -> Round:
    """Return the messages of one distance; the last subtree may be incomplete."""

    def slots(rank: int, _repetition: int) -> Sequence[int]:
        place = (rank - root) % num_ranks
        return _blocks(place + distance, distance, num_ranks, root)

    senders = _senders(num_ranks, distance)
    counts = np.minimum(distance, num_ranks - senders - distance)
    targets = (senders + distance + root) % num_ranks
    return Round((senders + root) % num_ranks, targets, counts, slots)


def _blocks(place: int, size: int, num_ranks: int, root: int) -> Sequence[int]:
    return tuple((i + root) % num_ranks for i in range(place, min(place + size, num_ranks)))


def _backwards(step: Round) -> Round:
    """Return a round that sends the same blocks back from receivers to senders."""
    parents = dict(zip(step.targets.tolist(), step.sources.tolist(), strict=True))

    def slots(rank: int, repetition: int) -> Sequence[int]:
        return step.slots(parents[rank], repetition)

    return step._replace(sources=step.targets, targets=step.sources, slots=slots)
