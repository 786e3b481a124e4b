"""Rings in two dimensions: first along rows, then along columns, then along rows again.

    rows (fast links, such as inside a host)         columns (slow links, between hosts)

      0 - 1 - 2 - 3    reduce-scatter: each rank      0   1   2   3    all-reduce of that quarter
      4 - 5 - 6 - 7    holds a quarter of its         |   |   |   |
                       row's sum                      4   5   6   7    then all-gather along rows

Each rank exchanges only l / (ranks of a row) bytes with other hosts, which is the minimum for the
slow links. If ranks are connected as a grid, with rings along rows and columns, the same algorithm
is the all-reduce of a 2-D torus. The algorithm takes 2 (rows + columns - 2) rounds instead of the 2
(p-1) of a ring.

    >>> from braid.programs.schedule.collective.rounds import carried_out
    >>> carried_out(all_reduce(3, row=3), [(2, 4, 6), (1, 2, 3), (4, 8, 12)])
    [(7, 14, 21), (7, 14, 21), (7, 14, 21)]

Source: H. Mikami et al., Massively distributed SGD: ImageNet/ResNet-50 training in a flash,
arXiv:1811.05233 (2018), 2D-torus all-reduce; NCCL's hierarchical rings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from braid.errors import ConfigError
from braid.programs.schedule.collective.ring import rings
from braid.programs.schedule.collective.rounds import Rounds

__all__ = ["all_reduce", "torus"]


def all_reduce(num_ranks: int, row: int, name: str = "hierarchical") -> Rounds:
    """Return the rounds of an all-reduce along rows of `row` ranks, then columns, then rows.

    Args:
        num_ranks: World size, a multiple of `row`.
        row: Number of ranks of a host, or the size of one dim of a torus.
        name: Name of the algorithm.

    Raises:
        ConfigError: `row` does not divide `num_ranks`.
    """
    if row < 1 or num_ranks % row:
        msg = (
            f"{num_ranks} ranks cannot be divided into rows of {row}: use a divisor of {num_ranks}"
        )
        raise ConfigError(msg)
    rows = np.arange(num_ranks).reshape(-1, row)
    height = len(rows)

    def along_row(_rank: int, part: int) -> Sequence[int]:
        return range(part * height, (part + 1) * height)

    def along_column(rank: int, part: int) -> Sequence[int]:
        return (rank % row * height + part,)

    steps = (
        *rings(rows, along_row, ahead=-1, adds=True),  # the rank at place i ends with part i
        *rings(rows.T, along_column, adds=True),
        *rings(rows.T, along_column, ahead=1),
        *rings(rows, along_row),
    )
    return Rounds(name, "all_reduce", num_ranks, num_ranks, steps)


def torus(num_ranks: int) -> Rounds:
    """Return the rounds of an all-reduce on the most square torus; a ring for a prime."""
    row = next(n for n in range(round(num_ranks**0.5) + 1, 0, -1) if num_ranks % n == 0)
    return all_reduce(num_ranks, row, "torus")
