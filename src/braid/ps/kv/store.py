"""A store that sums the pushed values of each key, in a tensor of rows with an index of slots.

Keys that were never pushed are zero. The first push determines the length and dtype of the values
of all keys. A request with the same keys as the previous one needs no search, since training often
pushes and pulls the same keys repeatedly.

Source: PS-Lite's KVServerDefaultHandle, which has a hash map with one value per key.
"""

from __future__ import annotations

import torch

from braid.errors import ConfigError
from braid.ps.storage.hash_index import HashIndex

__all__ = ["SumStore"]

FIRST_SLOTS = 64


class SumStore:
    """Table with the sum of all pushed rows for each id."""

    def __init__(self) -> None:
        self._index = HashIndex()
        self._ids = torch.zeros(FIRST_SLOTS, dtype=torch.int64)
        self._rows: torch.Tensor | None = None
        self._num_used = 0
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # ids with their slots

    def __len__(self) -> int:
        return self._num_used

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the values; None before the first push."""
        return None if self._rows is None else self._rows.dtype

    def add(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Add rows to the sums of distinct ids; shapes [n], [n, length].

        Raises:
            ConfigError: The values have another length or dtype than before.
        """
        self._check(rows.shape[1], rows.dtype)
        if self._rows is None:
            self._rows = torch.zeros(FIRST_SLOTS, rows.shape[1], dtype=rows.dtype)
        slots = self._slots(ids)
        new = (slots < 0).nonzero().flatten()
        if len(new):
            slots = slots.clone()
            slots[new] = self._insert(ids[new])
            self._last = ids, slots
        self._rows.index_add_(0, slots, rows)

    def read(self, ids: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows of ids; zeros of this length and dtype before the first push.

        Raises:
            ConfigError: The store has values of another dtype.
        """
        if self._rows is None:
            return torch.zeros(len(ids), length, dtype=dtype)
        if dtype != self._rows.dtype:
            msg = (
                f"the store has values of {self._rows.dtype}, but {dtype} was requested: pull into "
                "a tensor of the store's dtype"
            )
            raise ConfigError(msg)
        slots = self._slots(ids)
        rows = self._rows.index_select(0, slots.clamp(min=0))
        return rows.masked_fill_((slots < 0)[:, None], 0) if bool((slots < 0).any()) else rows

    def _check(self, length: int, dtype: torch.dtype) -> None:
        if self._rows is None:
            return
        expected = self._rows.shape[1], self._rows.dtype
        if (length, dtype) != expected:
            msg = (
                f"the store has {expected[0]} values of {expected[1]} per key, but the push has "
                f"{length} values of {dtype} per key: push the same number and dtype"
            )
            raise ConfigError(msg)

    def _slots(self, ids: torch.Tensor) -> torch.Tensor:
        if self._last is not None and torch.equal(self._last[0], ids):
            return self._last[1]
        slots = self._index.find(ids, self._ids)
        self._last = ids, slots
        return slots

    def _insert(self, ids: torch.Tensor) -> torch.Tensor:
        assert self._rows is not None, "the first push makes the rows"
        first, end = self._num_used, self._num_used + len(ids)
        if end > len(self._ids):
            size = max(end, 2 * len(self._ids))
            self._ids = torch.cat([self._ids, self._ids.new_zeros(size - len(self._ids))])
            more = self._rows.new_zeros(size - len(self._rows), self._rows.shape[1])
            self._rows = torch.cat([self._rows, more])
        self._ids[first:end] = ids
        self._num_used = end
        slots = torch.arange(first, end)
        if self._index.has_room(len(ids)):
            self._index.insert(ids, slots)
        else:
            self._index.rebuild(self._ids[:end], torch.arange(end))
        return slots
