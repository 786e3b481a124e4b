"""Distance of two tensors in ulps, which distinguishes rounding from mistakes.

An absolute difference depends on the size of the numbers, and a relative one is useless near zero.
The count of floating-point numbers between two numbers (ulps, units in the last place) works
everywhere: 0 is the same number, a few come from another order of additions, millions are a bug.

Source: D. Goldberg, "What Every Computer Scientist Should Know About Floating-Point Arithmetic",
ACM Computing Surveys 23 (1991).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Difference", "difference", "difference_of_ranks", "ulps_between"]

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


class Difference(NamedTuple):
    """The largest difference of two tensors.

    Attributes:
        parameter: Name of the parameter.
        place: Index of the number.
        value: The number in the parallel run, as text.
        expected: The number in one process, as text.
        ulps: Number of floating-point numbers between the two.
        differing: Number of elements of the parameter that differ.
        numel: Number of elements of the parameter.
        ranks: Ranks with other values than rank `usual`; the first has `value`. Empty if all ranks
            agree and differ from one process.
        usual: Rank of `expected`, if ranks differ from each other.
    """

    parameter: str
    place: tuple[int, ...]
    value: str
    expected: str
    ulps: int
    differing: int
    numel: int
    ranks: tuple[int, ...] = ()
    usual: int = 0

    def __str__(self) -> str:
        at = f"[{', '.join(map(str, self.place))}]" if self.place else ""
        sides = ("in the parallel run", "in one process")
        also = ""
        if self.ranks:
            sides = (f"on rank {self.ranks[0]}", f"on rank {self.usual}")
            rest = ", ".join(map(str, self.ranks[1:]))
            also = f"; rank {rest} also has other numbers" if rest else ""
        return (
            f"{self.parameter}{at} is {self.value} {sides[0]} and {self.expected} {sides[1]}, "
            f"{self.ulps:,} ulps apart; "
            f"{self.differing:,} of its {self.numel:,} numbers differ{also}"
        )


def ulps_between(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the element-wise number of floating-point steps from `a` to `b`, as int64.

    For integer dtypes this is the absolute difference. Both zeros are the same number. NaN has the
    largest distance from every number, and the distance 0 from NaN.

    >>> a, b = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1.0 + 2**-23, -0.0, -2.0])
    >>> ulps_between(a, b).tolist()
    [1, 0, 2147483648]
    """
    if a.is_complex():
        return ulps_between(torch.view_as_real(a), torch.view_as_real(b)).amax(-1)
    if not a.dtype.is_floating_point:
        return (a.to(torch.int64) - b.to(torch.int64)).abs()
    x, y = _ordered(a), _ordered(b)
    apart = (x - y).abs()
    most = torch.full_like(apart, torch.iinfo(torch.int64).max)
    overflows = (x.double() - y.double()).abs() >= float(1 << 62)
    apart = torch.where(overflows, most, apart)
    nan_a, nan_b = a.isnan(), b.isnan()
    apart = torch.where(nan_a | nan_b, most, apart)
    return torch.where(nan_a & nan_b, torch.zeros_like(apart), apart)


def difference(name: str, actual: torch.Tensor, expected: torch.Tensor) -> Difference | None:
    """Return the largest difference of two values of parameter `name`; None if they are equal."""
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    if torch.equal(actual, expected):
        return None
    apart = ulps_between(actual, expected).flatten()
    if not bool(apart.any()):
        return None
    worst = int(apart.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), actual.shape))
    return Difference(
        name,
        index,
        repr(actual.flatten()[worst].item()),
        repr(expected.flatten()[worst].item()),
        int(apart[worst]),
        int((apart > 0).sum()),
        actual.numel(),
    )


def difference_of_ranks(
    name: str, rows: Sequence[torch.Tensor], ranks: Sequence[int]
) -> Difference | None:
    """Return the largest difference of a rank from the majority of ranks, or None if all agree.

    Args:
        name: Name of the parameter.
        rows: Values of the parameter, by rank.
        ranks: Rank of each row.
    """
    alike = [sum(torch.equal(row, other) for other in rows) for row in rows]
    usual = alike.index(max(alike))
    compared = [
        (difference(name, row, rows[usual]), rank) for row, rank in zip(rows, ranks, strict=True)
    ]
    odd = [(one, rank) for one, rank in compared if one is not None]
    if not odd:
        return None
    worst, its = max(odd, key=lambda pair: pair[0].ulps)
    others = (rank for _, rank in odd if rank != its)
    return worst._replace(ranks=(its, *others), usual=ranks[usual])


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Map floating-point numbers to integers of the same order; neighbours are one apart."""
    bits = x.contiguous().view(_BITS[x.dtype]).to(torch.int64)
    width = x.element_size() * 8
    magnitude = bits & ((1 << (width - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)
