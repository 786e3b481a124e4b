"""Closed forms: costs of each algorithm on a network where every rank has one full-duplex link.

    T = messages * a  +  nbytes * b  +  flops * c

a: seconds per message, b: seconds per byte, c: seconds per byte added up; p: ranks; l: bytes of the
largest full buffer of a rank (the gathered one for gather, scatter and all-gather; all that a rank
sends for all-to-all); lg = ceil(log2 p). Counted along the longest chain of messages that wait for
each other. The simulator, which knows none of these, gives the same numbers (tests), so each proves
the other.

Source: R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19 (2005). The terms for numbers of ranks that
are not powers of two are derived from the programs here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from braid.errors import ConfigError
from braid.programs.schedule.program import check_ranks

__all__ = ["FORMS", "Cost", "form"]


class Cost(NamedTuple):
    """Cost of a sequence of steps, per rank.

    Attributes:
        messages: Number of messages.
        nbytes: Bytes sent; fractional if the number of ranks does not divide the buffer.
        flops: Bytes that are added up.
    """

    messages: int
    nbytes: float
    flops: float = 0.0

    def seconds(self, a: float, b: float, c: float = 0.0) -> float:
        """Return the seconds, with `a` per message, `b` per byte sent and `c` per byte added up."""
        return self.messages * a + self.nbytes * b + self.flops * c

    def __add__(self, other: object) -> Cost:
        """Return the cost of both in sequence."""
        if not isinstance(other, Cost):
            return NotImplemented
        return Cost(
            self.messages + other.messages, self.nbytes + other.nbytes, self.flops + other.flops
        )


Form = Callable[[int, float], Cost]


def _lg(p: int) -> int:
    return (p - 1).bit_length()


def _core(p: int) -> int:
    return 1 << (p.bit_length() - 1)


def _folded(p: int, l: float, core: Cost) -> Cost:
    """Add the cost of ranks above the largest power of two, which send before and receive after."""
    return core if p == _core(p) else core + Cost(2, 2 * l, l)


def _chain(p: int, l: float, adds: bool) -> Cost:
    """Return the cost of p-1 messages of a p-th each."""
    share = (p - 1) * l / p
    return Cost(p - 1, share, share * adds)


def _doubling(p: int, l: float) -> Cost:
    rounds = _lg(_core(p))
    return _folded(p, l, Cost(rounds, rounds * l, rounds * l))


def _halving_doubling(p: int, l: float) -> Cost:
    core = _core(p)
    share = (core - 1) * l / core
    return _folded(p, l, Cost(2 * _lg(core), 2 * share, share))


def _hypercube(p: int, l: float) -> Cost:
    """Return the cost of rank 0; its half has most blocks of ranks outside of the hypercube."""
    core = _core(p)
    others, rounds = p - core, _lg(core)
    blocks = sum((1 << i) + min(1 << i, others) for i in range(rounds))
    inside = Cost(rounds, blocks * l / p)
    return inside + Cost(2, l / p + l) if others else inside


def _bruck_all_to_all(p: int, l: float) -> Cost:
    blocks = sum(d.bit_count() for d in range(p))  # block d travels once for every bit of d
    return Cost(_lg(p), blocks * l / p)


def _torus(p: int, l: float) -> Cost:
    row = next(n for n in range(round(p**0.5) + 1, 0, -1) if p % n == 0)
    return grid(p, l, row)


def grid(p: int, l: float, row: int) -> Cost:
    """Return the cost of an all-reduce along rows of `row` ranks, then along columns.

    Args:
        p: Number of ranks.
        l: Bytes of the buffer of a rank.
        row: Number of ranks of a row.
    """
    column = p // row
    along_row = _chain(row, l, True) + _chain(row, l, False)
    along_column = _chain(column, l / row, True) + _chain(column, l / row, False)
    return along_row + along_column


FORMS: Mapping[tuple[str, str], Form] = {
    ("naive", "broadcast"): lambda p, l: Cost(p - 1, (p - 1) * l),
    ("naive", "reduce"): lambda p, l: Cost(p - 1, (p - 1) * l, (p - 1) * l),
    ("naive", "all_reduce"): lambda p, l: Cost(2 * (p - 1), 2 * (p - 1) * l, (p - 1) * l),
    ("naive", "gather"): lambda p, l: _chain(p, l, False),
    ("naive", "scatter"): lambda p, l: _chain(p, l, False),
    ("naive", "all_gather"): lambda p, l: _chain(p, l, False) + Cost(p - 1, (p - 1) * l),
    ("tree", "broadcast"): lambda p, l: Cost(_lg(p), _lg(p) * l),
    ("tree", "reduce"): lambda p, l: Cost(_lg(p), _lg(p) * l, _lg(p) * l),
    ("tree", "all_reduce"): lambda p, l: Cost(2 * _lg(p), 2 * _lg(p) * l, _lg(p) * l),
    ("tree", "gather"): lambda p, l: Cost(_lg(p), (p - 1) * l / p),
    ("tree", "scatter"): lambda p, l: Cost(_lg(p), (p - 1) * l / p),
    ("ring", "reduce_scatter"): lambda p, l: _chain(p, l, True),
    ("ring", "all_gather"): lambda p, l: _chain(p, l, False),
    ("ring", "all_reduce"): lambda p, l: _chain(p, l, True) + _chain(p, l, False),
    ("pairwise", "reduce_scatter"): lambda p, l: _chain(p, l, True),
    ("pairwise", "all_gather"): lambda p, l: _chain(p, l, False),
    ("pairwise", "all_to_all"): lambda p, l: _chain(p, l, False),
    ("bruck", "all_gather"): lambda p, l: Cost(_lg(p), (p - 1) * l / p),
    ("bruck", "all_to_all"): _bruck_all_to_all,
    ("hypercube", "all_gather"): _hypercube,
    ("doubling", "all_reduce"): _doubling,
    ("halving_doubling", "all_reduce"): _halving_doubling,
    ("torus", "all_reduce"): _torus,
}


def form(algorithm: str, operation: str, p: int, l: float, *, row: int = 1) -> Cost:
    """Return the cost of `algorithm` for `operation` on p ranks with l bytes.

    Args:
        algorithm: Name of the algorithm, such as ring.
        operation: Name of the operation, such as all_reduce.
        p: Number of ranks.
        l: Bytes of the largest full buffer of a rank.
        row: Number of ranks of a host, for hierarchical.

    Raises:
        ConfigError: The algorithm is unknown, or a number of ranks or bytes is not valid.
    """
    check_ranks(p)
    if l < 0 or row < 1 or p % row:
        msg = (
            f"l must be at least 0 bytes, and row, the ranks of a host, must divide {p} ranks, "
            f"got l = {l} and row = {row}"
        )
        raise ConfigError(msg)
    if (algorithm, operation) == ("hierarchical", "all_reduce"):
        return grid(p, l, row)
    closed_form = FORMS.get((algorithm, operation))
    if closed_form is None:
        known = sorted(name for name, op in FORMS if op == operation)
        msg = (
            f"{algorithm} has no closed form for {operation}: choose one of "
            f"{', '.join(known) or 'none'}"
        )
        raise ConfigError(msg)
    return closed_form(p, l)
