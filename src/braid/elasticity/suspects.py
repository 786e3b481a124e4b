"""Finds ranks that compute wrongly or slowly, from figures of all ranks.

A flipped bit in a gradient is summed into the weights of all replicas, which stay equal: comparing
them shows nothing. So now and then each rank also computes the micro-batch of the next one, and the
two results are compared before they are used. A rank that computes wrongly differs from both of its
neighbours.

    micro-batch      0         1         2
    computed by    r0, r2    r1, r0    r2, r1       r1 is wrong: micro-batches 1 and 2 differ
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

__all__ = ["slow_rank", "wrong_ranks"]


def wrong_ranks(own: Sequence[int], checked: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that may have computed wrongly: none, one, or those that cannot be told.

    Args:
        own: Checksum of each rank's result for its own micro-batch.
        checked: Checksum of each rank's result for the micro-batch of the next rank.

    >>> wrong_ranks([5, 6, 7], [6, 7, 5])
    ()
    >>> wrong_ranks([5, 9, 7], [6, 9, 5])
    (1,)
    >>> wrong_ranks([5, 9, 7], [6, 7, 5])
    (0, 1)
    """
    size = len(own)
    pairs = [
        {rank, (rank + 1) % size} for rank in range(size) if checked[rank] != own[(rank + 1) % size]
    ]
    if not pairs:
        return ()
    common = set.intersection(*pairs)
    return tuple(sorted(common or set.union(*pairs)))


def slow_rank(seconds: Sequence[float], factor: float) -> int | None:
    """Return the rank whose steps take `factor` times as long as those of its peers; None without.

    Args:
        seconds: Seconds of each rank.
        factor: Factor between the slowest rank and the median of the others.

    >>> slow_rank([1.0, 1.1, 3.0], 2.0), slow_rank([1.0, 1.9], 2.0)
    (2, None)
    """
    rank = max(range(len(seconds)), key=lambda r: seconds[r])
    others = [value for r, value in enumerate(seconds) if r != rank]
    return rank if others and seconds[rank] > factor * median(others) else None
