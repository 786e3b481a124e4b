"""Mixing matrices: who averages with whom, and with which weights, as data.

Pure: no torch, no communication.

Problem: methods without a centre let each rank average with a few others a step. Whether that leads
everybody to the same model, and how fast, depends on the weights alone; wrong ones move the mean
away, in silence.

Idea: the weights are a matrix, checked when it is made. W[i][j] is the weight with which rank i
takes what rank j has:

    x_i <- sum_j W[i][j] x_j

    columns sum to 1    nothing is lost: the sum over ranks stays what it is (enough for push-sum)
    rows sum to 1       ranks that are equal stay equal (both: "doubly stochastic")
    rows are not empty  nobody gives all away and is left with nothing
    connected           everybody hears of everybody in the course of some turns, and does so in
                        every later turn: models that only change places never agree

What is left of a disagreement after a step is at most the second largest modulus of an eigenvalue
times as large, in the long run; one less that is the spectral gap. The matrices of a graph that
changes follow each other in turns; their gap is that of a whole turn.

    ring          2 messages a step, gap O(1 / n^2)
    exponential   log2 n messages a step, gap O(1 / log n)
    one_peer      1 message a step; after log2 n steps the exact mean, when n is a power of 2
    complete      n - 1 messages, gap 1

Source: Xiao, Boyd, "Fast linear iterations for distributed averaging", 2004; Assran et al.,
"Stochastic Gradient Push", ICML 2019 (exponential graphs); Ying et al., "Exponential Graph is
Provably Efficient for Decentralized Deep Training", NeurIPS 2021.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from braid.errors import ConfigError

__all__ = ["Matrix", "Mixing"]

Matrix = tuple[tuple[float, ...], ...]
TOLERANCE = 1e-9  # of sums; weights are quotients of small numbers
COARSE = 1e-6  # for each rank, of sums of weights that are given in 32 bits
MAX_ROUNDS = 100


class Mixing(NamedTuple):
    """Mixing matrices that follow each other in turns; made by the class methods.

    Attributes:
        name: Name in messages.
        matrices: Matrices, one for each step of a turn.
    """

    name: str
    matrices: tuple[Matrix, ...]

    @classmethod
    def of(
        cls,
        matrices: Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]],
        name: str = "own",
    ) -> Mixing:
        """Make a mixing of the user's own matrices.

        Args:
            matrices: One square matrix, or several that follow each other, as lists, arrays or
                tensors. Weights of 32 bits, whose sums are rounded, are divided by these, so that
                nothing is lost in 64.
            name: Name in messages.

        Raises:
            ConfigError: They are no matrices of numbers, weights are negative, columns do not sum
                to 1, a rank is left with nothing, or ranks never hear of all others at once. The
                message names all of these.
        """
        checked = []
        try:
            several: Sequence[Any] = [matrices] if _is_one(matrices) else matrices
            for given in several:
                matrix = tuple(tuple(map(float, row)) for row in given)
                checked.append(_exact(matrix) if _is_coarse(given) else matrix)
        except (TypeError, ValueError) as exc:
            msg = (
                f"mixing {name!r} must be made of matrices of numbers, such as [[[0.5, 0.5], "
                f"[0.5, 0.5]]] for two ranks, got {matrices!r}: {exc}"
            )
            raise ConfigError(msg) from exc
        mixing = cls(name, tuple(checked))
        _check(mixing)
        return mixing

    @classmethod
    def ring(cls, size: int) -> Mixing:
        """Return a ring: a third from each neighbour and from oneself; halves for two ranks."""
        return cls("ring", (_circulant(size, (-1, 0, 1)),))

    @classmethod
    def complete(cls, size: int) -> Mixing:
        """Return the mixing of everybody with everybody: the mean at once."""
        return cls("complete", (_circulant(size, range(size)),))

    @classmethod
    def exponential(cls, size: int) -> Mixing:
        """Return the directed graph in which each rank takes from those 1, 2, 4, ... before it."""
        return cls("exponential", (_circulant(size, [0, *_hops(size)]),))

    @classmethod
    def one_peer(cls, size: int) -> Mixing:
        """Return the directed graph in which each rank takes from one: 1, 2, 4, ... before it."""
        hops = _hops(size) or [0]
        return cls("one_peer", tuple(_circulant(size, (0, hop)) for hop in hops))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.matrices[0])

    @property
    def doubly_stochastic(self) -> bool:
        """Whether rows sum to 1, like columns."""
        return not any(_wrong_sums(matrix, "row") for matrix in self.matrices)

    def at(self, step: int) -> Matrix:
        """Return the matrix of a step."""
        return self.matrices[step % len(self.matrices)]

    def sources(self, rank: int, step: int) -> list[int]:
        """Return the ranks from which `rank` takes something in a step, besides itself."""
        row = self.at(step)[rank]
        return [j for j, weight in enumerate(row) if weight and j != rank]

    def targets(self, rank: int, step: int) -> list[int]:
        """Return the ranks to which `rank` gives something in a step, besides itself."""
        return [i for i, row in enumerate(self.at(step)) if row[rank] and i != rank]

    def spectral_gap(self) -> float:
        """Return 1 less the second largest modulus of an eigenvalue, for a whole turn.

        It is between 0 (never the mean) and 1 (the mean at once).

        >>> round(Mixing.ring(4).spectral_gap(), 6), round(Mixing.one_peer(8).spectral_gap(), 6)
        (0.666667, 1.0)
        """
        if self.size == 1:
            return 1.0
        turn = reduce(
            lambda done, matrix: np.asarray(matrix) @ done, self.matrices, np.eye(self.size)
        )
        moduli = np.sort(np.abs(np.linalg.eigvals(turn)))
        return float(1.0 - moduli[-2])

    def __repr__(self) -> str:
        return f"Mixing({self.name!r}, {self.size} ranks, {len(self.matrices)} in a turn)"


def _hops(size: int) -> list[int]:
    return [1 << k for k in range((size - 1).bit_length())]


def _circulant(size: int, shifts: Sequence[int]) -> Matrix:
    """Return the matrix in which ranks take equal shares from the ranks `shifts` before them."""
    if size < 1:
        msg = f"number of ranks to mix must be at least 1, got {size}"
        raise ConfigError(msg)
    rows = [[0.0] * size for _ in range(size)]
    distances = {shift % size for shift in shifts}
    for rank, row in enumerate(rows):
        for distance in distances:
            row[rank - distance] = 1.0 / len(distances)
    return tuple(map(tuple, rows))


def _check(mixing: Mixing) -> None:
    size = len(mixing.matrices[0]) if mixing.matrices else 0
    square = all(
        len(matrix) == size and all(len(row) == size for row in matrix)
        for matrix in mixing.matrices
    )
    wrong: list[str] = []
    if not size or not square:
        wrong.append("no square matrices of one size")
    else:
        for step, matrix in enumerate(mixing.matrices):
            wrong += [
                f"{weight} for what rank {i} takes from {j} in step {step}"
                for i, row in enumerate(matrix)
                for j, weight in enumerate(row)
                if not 0.0 <= weight < float("inf")
            ]
            wrong += [f"{problem} in step {step}" for problem in _wrong_sums(matrix, "column")]
            wrong += [
                f"nothing for rank {i} in step {step}"
                for i, row in enumerate(matrix)
                if not any(row)
            ]
        if not wrong and not _agree(mixing):
            wrong.append("ranks that never hear of some others, or only change places")
    if wrong:
        msg = (
            f"mixing {mixing.name!r} needs weights that are not negative, columns that sum to "
            f"1 and ranks that all hear of each other, got {'; '.join(wrong[:8])}"
        )
        raise ConfigError(msg)


def _is_one(matrices: Any) -> bool:
    """Return whether `matrices` is one matrix, not several."""
    if not len(matrices) or not len(matrices[0]):
        return False
    try:
        len(matrices[0][0])
    except TypeError:  # a number, also one of a library
        return True
    return False


def _is_coarse(given: Any) -> bool:
    """Return whether a matrix, its rows or its numbers have a dtype of fewer than 64 bits."""
    for _ in range(3):
        dtype = getattr(given, "dtype", None)
        if dtype is not None:
            return bool(dtype.itemsize < np.float64().itemsize)
        try:
            if not len(given):
                return False
        except TypeError:
            return False
        given = given[0]
    return False


def _exact(matrix: Matrix) -> Matrix:
    """Return the matrix divided by its sums where these are 1 but for rounding.

    The sums are those of columns, and in turns with them those of rows (Sinkhorn), if these are 1
    as well. They are exact, so that all ranks compute the same.
    """
    bound = COARSE * len(matrix)
    if any(len(row) != len(matrix) for row in matrix) or not _sums_to_one(
        zip(*matrix, strict=True), bound
    ):
        return matrix
    both = _sums_to_one(matrix, bound)
    for _ in range(MAX_ROUNDS):
        if both:
            matrix = _divided(matrix)
        matrix = tuple(zip(*_divided(tuple(zip(*matrix, strict=True))), strict=True))
        if not both or _sums_to_one(matrix, TOLERANCE / 2):
            break
    return matrix


def _sums_to_one(lines: Iterable[Sequence[float]], bound: float) -> bool:
    return all(abs(math.fsum(line) - 1.0) <= bound for line in lines)


def _divided(matrix: Matrix) -> Matrix:
    sums = [math.fsum(row) for row in matrix]
    return tuple(tuple(x / s for x in row) for row, s in zip(matrix, sums, strict=True))


def _wrong_sums(matrix: Matrix, kind: str) -> list[str]:
    lines = matrix if kind == "row" else zip(*matrix, strict=True)
    sums = [sum(line) for line in lines]
    return [
        f"{kind} {k} that sums to {_sum(s)}" for k, s in enumerate(sums) if abs(s - 1.0) > TOLERANCE
    ]


def _sum(value: float) -> str:
    """Return a sum as text, with as many digits as distinguish it from 1."""
    return f"{value:.6g}" if f"{value:.6g}" != "1" else f"1{value - 1.0:+.2g}"


def _agree(mixing: Mixing) -> bool:
    """Return whether the matrix of a turn is primitive: some power has no zero weight.

    If any power is so, the one of exponent size^2 - 2 size + 2 is (Wielandt 1950), and so are all
    larger ones.
    """
    turn = np.eye(mixing.size)
    for matrix in mixing.matrices:
        turn = np.minimum(np.where(np.asarray(matrix) > 0, 1.0, 0.0) @ turn, 1.0)
    for _ in range(2 * mixing.size.bit_length()):  # 2, 4, 8, ... turns
        turn = np.minimum(turn @ turn, 1.0)
    return bool((turn > 0).all())
