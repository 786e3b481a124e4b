"""Initial rows of a sparse table, each a pure function of seed, table, id and element.

Problem: rows are created on the server that has their shard, in any order, and again on replicas.
With a stateful generator, their values would depend on the number of servers.

Idea: Philox computes random bits from a key (seed and table) and a counter (id and element). Normal
numbers are quantiles of uniform ones, computed in float64 only with additions, products, quotients
and square roots: these round identically on every machine, unlike the logarithms of different
libraries.

Sources: J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011; M. Wichura,
Algorithm AS 241 (PPND7), Applied Statistics 37, 1988.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import torch

from braid.errors import ConfigError
from braid.runtime.seeding import key_of, random_words

__all__ = ["Constant", "GivenRows", "Init", "Normal", "Uniform", "initial_rows"]

BITS = 24  # of randomness for each element
CHUNK = 1024  # rows at a time, so that intermediate results stay in caches
Fraction: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]
# coefficients of AS 241 PPND7, highest power first
CENTRAL: Fraction = (
    (5.9109374720e01, 1.5929113202e02, 5.0434271938e01, 3.3871327179e00),
    (6.7187563600e01, 7.8757757664e01, 1.7895169469e01, 1.0),
)
TAIL: Fraction = (
    (1.7023821103e-01, 1.3067284816e00, 2.7568153900e00, 1.4234372777e00),
    (1.2021132975e-01, 7.3700164250e-01, 1.0),
)


class Init(ABC):
    """Distribution from which the elements of a new row of a sparse table are drawn."""

    @abstractmethod
    def draw(self, key: int, ids: torch.Tensor, dim: int) -> torch.Tensor:
        """Return initial rows in float64, of shape [len(ids), dim]; `key` seeds the draws."""


@dataclass(frozen=True, slots=True)
class Constant(Init):
    """The same value for all elements."""

    value: float = 0.0

    def draw(self, key: int, ids: torch.Tensor, dim: int) -> torch.Tensor:  # noqa: ARG002
        """Return initial rows of shape [len(ids), dim]; see `Init.draw`."""
        return torch.full((len(ids), dim), self.value, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Uniform(Init):
    """Numbers between two bounds, in steps of 2^-24 of their distance.

    Raises:
        ConfigError: The bounds are not finite, or in the wrong order.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not -math.inf < self.low <= self.high < math.inf:
            msg = f"Uniform: bounds must be finite with low <= high, got {self.low}, {self.high}"
            raise ConfigError(msg)

    def draw(self, key: int, ids: torch.Tensor, dim: int) -> torch.Tensor:
        """Return initial rows of shape [len(ids), dim]; see `Init.draw`."""
        return _fractions(key, ids, dim).mul_(self.high - self.low).add_(self.low)


@dataclass(frozen=True, slots=True)
class Normal(Init):
    """Normal numbers, up to 5.4 standard deviations.

    Raises:
        ConfigError: The standard deviation is negative.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.std < math.inf or not math.isfinite(self.mean):
            msg = f"Normal: needs a finite mean and std >= 0, got {self.mean}, {self.std}"
            raise ConfigError(msg)

    def draw(self, key: int, ids: torch.Tensor, dim: int) -> torch.Tensor:
        """Return initial rows of shape [len(ids), dim]; see `Init.draw`."""
        return normal_quantiles(_fractions(key, ids, dim)).mul_(self.std).add_(self.mean)


@dataclass(frozen=True, slots=True, eq=False)
class GivenRows(Init):
    """Initial rows from a tensor, such as a model's embedding; ids are indices into it."""

    rows: torch.Tensor

    def draw(self, key: int, ids: torch.Tensor, dim: int) -> torch.Tensor:  # noqa: ARG002
        """Return initial rows of shape [len(ids), dim]; see `Init.draw`.

        Raises:
            ConfigError: An id is out of range.
        """
        wrong = ids[(ids < 0) | (ids >= len(self.rows))]
        if len(wrong):
            msg = f"row {int(wrong[0])} does not exist: the table has {len(self.rows)} rows"
            raise ConfigError(msg)
        return self.rows[ids].to(torch.float64)


def initial_rows(
    init: Init, seed: int, table: str, ids: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the initial rows of ids.

    Args:
        init: Distribution of the elements.
        seed: Seed of the run.
        table: Name of the table.
        ids: Ids, int64, in any order.
        dim: Number of elements of a row.
        dtype: Dtype of the rows; they are computed in float64 and rounded to it.

    Shape:
        ids: [n]; result: [n, dim].

    Cost: about 40 ns per element of a random row.
    """
    key = key_of("initial rows", seed, table)
    rows = torch.empty((len(ids), dim), dtype=dtype)
    for begin in range(0, len(ids), CHUNK):
        chunk = slice(begin, begin + CHUNK)
        rows[chunk] = init.draw(key, ids[chunk], dim)
    return rows


def normal_quantiles(p: torch.Tensor) -> torch.Tensor:
    """Return the quantiles of the standard normal distribution at probabilities p.

    Args:
        p: Probabilities in float64, in [2^-25, 1 - 2^-25]; any shape.

    Returns:
        Quantiles in the same shape, with a relative error below 1e-6.
    """
    q = p.flatten() - 0.5
    quantiles = _ratio(CENTRAL, 0.180625 - q * q).mul_(q)
    tails = (q.abs() > 0.425).nonzero().flatten()
    signs = q.index_select(0, tails)
    r = _log(0.5 - signs.abs()).neg_().sqrt_().sub_(1.6)
    return quantiles.index_copy_(0, tails, _ratio(TAIL, r).copysign_(signs)).view(p.shape)


def _fractions(key: int, ids: torch.Tensor, dim: int) -> torch.Tensor:
    """Return uniform numbers in the middle of 2^24 equal parts of (0, 1), in float64."""
    words = random_words(key, ids, dim) >> (32 - BITS)
    return words.to(torch.float64).add_(0.5).mul_(2.0**-BITS)


def _ratio(fraction: Fraction, x: torch.Tensor) -> torch.Tensor:
    above, below = (_polynomial(coefficients, x) for coefficients in fraction)
    return above.div_(below)


def _polynomial(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    """Evaluate a polynomial by Horner's rule, rounding after each product and each sum."""
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total.mul_(x).add_(coefficient)
    return total


def _log(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm, from the exponent and a series of the mantissa, to 1e-10."""
    mantissa, exponent = torch.frexp(x)  # mantissa in [1/2, 1)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2, mantissa)
    s = (mantissa - 1).div_(mantissa + 1)
    series = _polynomial(tuple(2 / k for k in range(13, 0, -2)), s * s).mul_(s)
    return exponent.sub_(small.to(exponent.dtype)).to(x.dtype).mul_(math.log(2)).add_(series)
