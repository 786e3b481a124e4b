"""How far apart two tensors are, in units that say whether it is rounding.

An absolute difference says nothing without the size of the numbers, and a relative one nothing near
zero. The number of floating-point numbers between two of them (ulps, units in the last place) does:
0 is the same number, a handful is another order of additions, and millions are a bug.

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
    """Where two tensors differ most.

    Attributes:
        parameter: Name.
        place: Index of the number.
        found: In the parallel run, as text.
        expected: In one process, likewise.
        ulps: Floating-point numbers between them.
        differing: Numbers of the parameter that differ.
        numel: Numbers that it has.
        ranks: Ranks that have others than `usual` has, the one of `found` first; empty where all
            ranks have the same, and one process another.
        usual: Rank of `expected` where ranks differ.
    """

    parameter: str
    place: tuple[int, ...]
    found: str
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
            also = f"; on rank {rest} there are others, too" if rest else ""
        return (
            f"{self.parameter}{at} is {self.found} {sides[0]} and {self.expected} {sides[1]}, "
            f"{self.ulps:,} ulps apart; "
            f"{self.differing:,} of its {self.numel:,} numbers differ{also}"
        )


def ulps_between(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Floating-point numbers between each two elements, as int64; of other dtypes the absolute difference.

    Both zeros are the same number; NaN is as far as can be from all but NaN.

    >>> ulps_between(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1.0 + 2**-23, -0.0, -2.0])).tolist()
    [1, 0, 2147483648]
    """
    if a.is_complex():
        return ulps_between(torch.view_as_real(a), torch.view_as_real(b)).amax(-1)
    if not a.dtype.is_floating_point:
        return (a.to(torch.int64) - b.to(torch.int64)).abs()
    x, y = _ordered(a), _ordered(b)
    apart = (x - y).abs()
    far = torch.full_like(apart, torch.iinfo(torch.int64).max)
    apart = torch.where(
        (x.double() - y.double()).abs() >= float(1 << 62), far, apart
    )  # more than an int64 holds
    nan_a, nan_b = a.isnan(), b.isnan()
    apart = torch.where(nan_a | nan_b, far, apart)
    return torch.where(nan_a & nan_b, torch.zeros_like(apart), apart)


def difference(name: str, found: torch.Tensor, expected: torch.Tensor) -> Difference | None:
    """Where they differ most; None where they do not."""
    found, expected = found.detach().cpu(), expected.detach().cpu()
    if torch.equal(found, expected):
        return None
    apart = ulps_between(found, expected).flatten()
    if not bool(apart.any()):
        return None
    worst = int(apart.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), found.shape))
    return Difference(
        name,
        index,
        repr(found.flatten()[worst].item()),
        repr(expected.flatten()[worst].item()),
        int(apart[worst]),
        int((apart > 0).sum()),
        found.numel(),
    )


def difference_of_ranks(
    name: str, rows: Sequence[torch.Tensor], ranks: Sequence[int]
) -> Difference | None:
    """Where ranks differ most from what most of them have; None where they do not.

    Args:
        name: Of the parameter.
        rows: Its values, by rank.
        ranks: Their numbers.
    """
    alike = [sum(torch.equal(row, other) for other in rows) for row in rows]
    usual = alike.index(max(alike))
    found = [
        (difference(name, row, rows[usual]), rank) for row, rank in zip(rows, ranks, strict=True)
    ]
    odd = [(one, rank) for one, rank in found if one is not None]
    if not odd:
        return None
    worst, its = max(odd, key=lambda pair: pair[0].ulps)
    others = (rank for _, rank in odd if rank != its)
    return worst._replace(ranks=(its, *others), usual=ranks[usual])


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the numbers, neighbours one apart."""
    bits = x.contiguous().view(_BITS[x.dtype]).to(torch.int64)
    width = x.element_size() * 8
    magnitude = bits & ((1 << (width - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)
