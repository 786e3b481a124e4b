"""Micro-batches that are read from an iterator when a program needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from braid.errors import ConfigError
from braid.parallel.pipeline.microbatches import num_rows
from braid.runtime.seeding import Draws

__all__ = ["MicrobatchStream"]


class _Taken(NamedTuple):
    batch: Any
    target: Any
    draws: Draws


class MicrobatchStream:
    """Sequence of micro-batches of an iterator; each is read once, in order.

    Args:
        microbatches: Pairs of input and target.
        count: Number of pairs to take.
        seed: Seed of the random numbers in layers, such as dropout.
        first: Number of the first micro-batch since the training began.
    """

    def __init__(
        self, microbatches: Iterable[tuple[Any, Any]], count: int, *, seed: int, first: int
    ) -> None:
        self._source: Iterator[tuple[Any, Any]] = iter(microbatches)
        self._count = count
        self._seed = seed
        self._first = first
        self._num_read = 0
        self._kept: dict[int, _Taken] = {}

    def __getitem__(self, i: int) -> Any:
        """Return the input of a micro-batch, and drop earlier micro-batches."""
        return self._at(i).batch

    def target(self, i: int) -> Any:
        """Return the target of a micro-batch."""
        return self._at(i).target

    def draws(self, i: int) -> Draws:
        """Return the random numbers, such as dropout masks, of micro-batch `i`."""
        return self._at(i).draws

    def exhaust(self) -> None:
        """Read the remaining micro-batches, so that all ranks' iterators have the same position."""
        while self._num_read < self._count:
            self._read()
        self._kept.clear()

    def _at(self, i: int) -> _Taken:
        while self._num_read <= i:
            self._read()
        for earlier in [number for number in self._kept if number < i]:
            del self._kept[earlier]
        return self._kept[i]

    def _read(self) -> None:
        pair = next(self._source, None)
        if pair is None:
            msg = (
                f"the iterator ended after {self._num_read} of {self._count} micro-batches: pass "
                "an iterator with more, or a smaller count"
            )
            raise ConfigError(msg)
        try:
            batch, target = pair
        except (TypeError, ValueError) as exc:
            msg = (
                f"a micro-batch must be a pair of input and target, got {type(pair).__name__}: "
                "pass pairs, as from a DataLoader"
            )
            raise ConfigError(msg) from exc
        rows, i = num_rows(batch), self._num_read
        if not rows:
            msg = f"micro-batch {i} has no rows: leave it out on all ranks"
            raise ConfigError(msg)
        self._kept[i] = _Taken(batch, target, Draws(self._seed, self._first + i, range(rows)))
        self._num_read += 1
