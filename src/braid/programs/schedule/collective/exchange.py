"""Each rank exchanges data with one partner at a time, at distance 1, 2, 4, ...

The partners of eight ranks, in three rounds:

    distance 4      distance 2      distance 1
    0 <------> 4    0 <----> 2      0 <--> 1
    1 <------> 5    1 <----> 3      2 <--> 3
    2 <------> 6    4 <----> 6      4 <--> 5
    3 <------> 7    5 <----> 7      6 <--> 7

Recursive halving uses the rounds from left to right. In each round, a rank sends half of the blocks
that it still adds up, and adds the other half from its partner. At the end each rank has the sum of
one block.

Recursive doubling uses the rounds from right to left. A rank sends all its data. So the number of
blocks (in an all-gather) or of ranks in a sum (in an all-reduce) doubles in each round. Three
algorithms use these rounds:

    algorithm           operation     rounds      sent by a rank         best for
    doubling            all_reduce    lg p        lg p l bytes           small buffers
    hypercube           all_gather    lg p        (p-1)/p l bytes        small and large buffers
    halving_doubling    all_reduce    2 lg p      2 (p-1)/p l bytes      large buffers

The first one is recursive doubling of whole buffers. The second one is recursive doubling of
blocks; its messages follow the edges of a hypercube with the ranks as corners. The third one is
recursive halving, then recursive doubling of the summed blocks.

If p is not a power of two, the remaining ranks above the largest power of two first send their
buffer to a partner. At the end they receive the result in one more round.

    >>> from braid.programs.schedule.collective.rounds import carried_out
    >>> for made in doubling, halving_doubling:
    ...     carried_out(made(3), [(2, 4, 6), (1, 2, 3), (4, 8, 12)])
    [(7, 14, 21), (7, 14, 21), (7, 14, 21)]
    [(7, 14, 21), (7, 14, 21), (7, 14, 21)]

Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in
MPICH, IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from braid.programs.schedule.collective.rounds import Round, Rounds
from braid.programs.schedule.program import check_ranks

__all__ = ["doubling", "halving_doubling", "hypercube"]

Slots = Callable[[int, int], Sequence[int]]


def doubling(num_ranks: int) -> Rounds:
    """Return the rounds of an all-reduce in which pairs of ranks exchange whole buffers."""
    core = _core(num_ranks)

    def whole(_rank: int, _repetition: int) -> Sequence[int]:
        return (0,)

    steps = tuple(_exchange(core, d, 1, whole) for d in _distances(core))
    return Rounds("doubling", "all_reduce", num_ranks, 1, folded(num_ranks, 1, steps))


def halving_doubling(num_ranks: int) -> Rounds:
    """Return the rounds of an all-reduce: halving reduces and scatters, doubling gathers."""
    core = _core(num_ranks)
    distances = _distances(core)
    steps = [_halve(core, distance) for distance in reversed(distances)]
    steps += [_gather(core, distance, core) for distance in distances]
    rounds = folded(num_ranks, core, tuple(steps))
    return Rounds("halving_doubling", "all_reduce", num_ranks, core, rounds)


def hypercube(num_ranks: int) -> Rounds:
    """Return the rounds of an all-gather along the edges of a hypercube.

    There are log2(`num_ranks`) rounds. If `num_ranks` is not a power of two, the
    remaining ranks first send their block to a partner.
    """
    core = _core(num_ranks)
    others = np.arange(core, num_ranks)
    steps = [_gather(core, distance, num_ranks) for distance in _distances(core)]
    if len(others):

        def own(rank: int, _repetition: int) -> Sequence[int]:
            return (rank,)

        def whole(_rank: int, _repetition: int) -> Sequence[int]:
            return range(num_ranks)

        steps.insert(0, Round(others, others - core, 1, own))
        steps.append(Round(others - core, others, num_ranks, whole))
    return Rounds("hypercube", "all_gather", num_ranks, num_ranks, tuple(steps))


def folded(num_ranks: int, num_blocks: int, steps: tuple[Round, ...]) -> tuple[Round, ...]:
    """Extend `steps` of the largest power of two of ranks to all `num_ranks` ranks.

    Each remaining rank sends its `num_blocks` blocks to a partner, and receives the result.
    """
    core = _core(num_ranks)
    others = np.arange(core, num_ranks)
    if not len(others):
        return steps

    def whole(_rank: int, _repetition: int) -> Sequence[int]:
        return range(num_blocks)

    before = Round(others, others - core, num_blocks, whole, adds=True)
    after = Round(others - core, others, num_blocks, whole)
    return (before, *steps, after)


def _core(num_ranks: int) -> int:
    check_ranks(num_ranks)
    return 1 << (num_ranks.bit_length() - 1)


def _distances(core: int) -> list[int]:
    return [1 << i for i in range(core.bit_length() - 1)]


def _exchange(core: int, distance: int, num_blocks: int, slots: Slots) -> Round:
    ranks = np.arange(core)
    return Round(ranks, ranks ^ distance, num_blocks, slots, adds=True)


def _halve(core: int, distance: int) -> Round:
    """Send the blocks that the partner's half is to hold."""

    def slots(rank: int, _repetition: int) -> Sequence[int]:
        first = (rank ^ distance) // distance * distance
        return range(first, first + distance)

    return _exchange(core, distance, distance, slots)


def _gather(core: int, distance: int, num_blocks: int) -> Round:
    """Send the blocks of this half; those from `core` on lie with the ranks `core` before them."""

    def slots(rank: int, _repetition: int) -> Sequence[int]:
        first = rank // distance * distance
        blocks = range(first, first + distance)
        return [*blocks, *(b + core for b in blocks if b + core < num_blocks)]

    ranks = np.arange(core)
    firsts = ranks // distance * distance
    counts = distance + np.clip(num_blocks - core - firsts, 0, distance)
    return Round(ranks, ranks ^ distance, counts, slots)
