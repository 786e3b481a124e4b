"""Partition of a list of layers into contiguous parts with a minimal largest cost.

A pipeline is as fast as its slowest stage. Of all partitions into `num_parts` nonempty parts, one
is chosen with

    1. the least largest cost of a part,
    2. among these the least sum of squares of the costs of parts,
    3. among these the least sum of squares of the numbers of layers,

    costs  5 | 1 1 1 | 1 1       not  5 | 1 1 1 1 1 |        nor  5 | 1 | 1 1 1 1

where 2 and 3 even out the parts that are not the heaviest. Costs are converted to integers over a
common denominator, so that sums are exact: the result is the same on every machine.

Source: the problem is linear partitioning; bisection over the limit follows A. Pinar, C. Aykanat,
"Fast optimal load balancing algorithms for 1D partitioning", JPDC 64 (2004). torchgpipe has a
heuristic for it (I. Barany, V. Grinberg, "Block partitions of sequences", 2015).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from braid.errors import raise_all

__all__ = ["block_partition"]

Merit = tuple[int, int]  # sums of squares: of the costs of parts, of their numbers of layers


def block_partition(costs: Sequence[float], num_parts: int) -> list[int]:
    """Return the number of layers of each part; see the module docstring.

    Args:
        costs: Cost of each layer, such as its seconds or bytes.
        num_parts: Number of parts.

    Raises:
        ConfigError: There are fewer layers than parts, or a cost is negative or not finite.

    Cost: O(n log(total)) for the limit; then O(n w num_parts), with w layers in the longest part
        within the limit.

    >>> block_partition([5, 1, 1, 1, 1, 1], 3)
    [1, 3, 2]
    """
    problems = []
    if num_parts < 1:
        problems.append(f"the number of parts must be at least 1, got {num_parts}")
    elif len(costs) < num_parts:
        problems.append(
            f"{len(costs)} layers cannot be divided into {num_parts} parts: use fewer parts"
        )
    wrong = {i: cost for i, cost in enumerate(costs) if not 0 <= cost < math.inf}
    if wrong:
        listed = ", ".join(f"{cost} of layer {i}" for i, cost in wrong.items())
        problems.append(f"costs must be finite and not negative, got {listed}")
    raise_all(problems)
    ends = [0, *accumulate(_integers(costs))]
    return _most_even(ends, num_parts, _least_limit(ends, num_parts))


def _integers(costs: Sequence[float]) -> list[int]:
    """Return costs multiplied by their common denominator."""
    ratios = [cost.as_integer_ratio() for cost in costs]
    common = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (common // denominator) for numerator, denominator in ratios]


def _least_limit(ends: Sequence[int], num_parts: int) -> int:
    """Return the smallest L for which parts of cost at most L hold all layers."""
    low, high = -1, ends[-1]  # low does not suffice, high does
    while high - low > 1:
        middle = (low + high) // 2
        if _suffices(ends, num_parts, middle):
            high = middle
        else:
            low = middle
    return high


def _suffices(ends: Sequence[int], num_parts: int, limit: int) -> bool:
    """Return whether parts that are filled in sequence, up to the limit, hold all layers.

    Fewer parts than `num_parts` suffice, because splitting a part makes no part heavier.
    """
    begin, used = 0, 1
    for before, end in pairwise(ends):
        if end - before > limit:
            return False
        if end - begin > limit:
            begin, used = before, used + 1
    return used <= num_parts


def _most_even(ends: Sequence[int], num_parts: int, limit: int) -> list[int]:
    """Return the most even parts within the limit.

    A dynamic program over prefixes: best[i] has the least merit of i layers in k parts, and the
    number of layers of the last part.
    """
    num_layers = len(ends) - 1
    best: list[tuple[Merit, int] | None] = [((0, 0), 0), *[None] * num_layers]
    last_parts: list[list[int]] = []
    for _ in range(num_parts):
        best = [_extended(best, ends, stop, limit) for stop in range(num_layers + 1)]
        last_parts.append([0 if cell is None else cell[1] for cell in best])
    sizes = []
    rest = num_layers
    for last_part in reversed(last_parts):
        sizes.append(last_part[rest])
        rest -= last_part[rest]
    return sizes[::-1]


def _extended(
    best: Sequence[tuple[Merit, int] | None], ends: Sequence[int], stop: int, limit: int
) -> tuple[Merit, int] | None:
    """Return the least merit of `stop` layers with one more part, and the part's size."""
    least: tuple[Merit, int] | None = None
    for start in range(stop - 1, -1, -1):
        cost, size = ends[stop] - ends[start], stop - start
        if cost > limit:
            break
        before = best[start]
        if before is not None:
            merit = before[0][0] + cost * cost, before[0][1] + size * size
            if least is None or (merit, size) < least:
                least = merit, size
    return least
