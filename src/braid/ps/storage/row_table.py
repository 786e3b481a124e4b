"""Rows with named columns, by id: growing tensors over a hash index.

    slot        0     1     2     3     4  ...  capacity, doubled when full
    ids        17    -5     9     .     2
    columns  [capacity, width] each: values, optimizer state, counts
    free                          3            slots of removed rows are used again first

Results by id do not depend on slots, so that tables with the same rows behave identically, however
they were filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from braid.ps.storage.hash_index import HashIndex

__all__ = ["RowTable", "Width"]

SMALLEST = 16  # rows


class Width(NamedTuple):
    """Number of elements per row, dtype and initial value of a column."""

    width: int
    dtype: torch.dtype
    fill: float = 0


class RowTable:
    """Table that maps ids to rows of one or several columns.

    Args:
        widths: Columns, by name.

    Attributes:
        columns: Tensor of each column, indexed by slot; replaced when the table grows.
    """

    def __init__(self, widths: Mapping[str, Width]) -> None:
        self._widths = dict(widths)
        self.clear()

    def clear(self) -> None:
        """Remove all rows."""
        self._index = HashIndex()
        self._ids = torch.zeros(SMALLEST, dtype=torch.int64)
        self._live = torch.zeros(SMALLEST, dtype=torch.bool)
        self.columns = {
            name: torch.empty((SMALLEST, width.width), dtype=width.dtype)
            for name, width in self._widths.items()
        }
        self._size = 0  # slots that have been used
        self._free = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._size - len(self._free)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, including free slots."""
        tensors = [self._ids, self._live, *self.columns.values()]
        return sum(tensor.nbytes for tensor in tensors) + 8 * self._index.num_buckets

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the slot (row index) of each id, and -1 for ids without a row; shape [n] each."""
        return self._index.find(ids, self._ids)

    def insert(self, ids: torch.Tensor) -> torch.Tensor:
        """Create rows with the columns' initial values.

        Args:
            ids: Distinct ids without rows.

        Shape:
            ids and result: [n].

        Returns:
            Slots of the rows.
        """
        slots = self._next_slots(len(ids))
        self._ids.index_copy_(0, slots, ids)
        self._live.index_fill_(0, slots, value=True)
        for name, width in self._widths.items():
            self.columns[name].index_fill_(0, slots, width.fill)
        if self._index.has_room(len(ids)):
            self._index.insert(ids, slots)
        else:
            live = self.slots()
            self._index.rebuild(self.ids(live), live)
        return slots

    def remove(self, slots: torch.Tensor) -> None:
        """Remove the rows at these distinct slots (row indices)."""
        self._index.remove(self._ids.index_select(0, slots), self._ids)
        self._live.index_fill_(0, slots, value=False)
        self._free = torch.cat([self._free, slots])

    def slots(self) -> torch.Tensor:
        """Return the slots (indices) of all rows, shape [rows]."""
        return self._live[: self._size].nonzero().flatten()

    def ids(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the ids of the rows at these slots, shape [n] each."""
        return self._ids.index_select(0, slots)

    def export(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return copies of all ids, ascending, and of their columns in that order."""
        slots = self.slots()
        ids, order = self.ids(slots).sort()
        slots = slots.index_select(0, order)
        return ids, {name: column.index_select(0, slots) for name, column in self.columns.items()}

    def load(self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> None:
        """Replace all rows by rows of distinct ids with these columns."""
        self.clear()
        slots = self.insert(ids)
        for name, column in self.columns.items():
            column.index_copy_(0, slots, columns[name])

    def _next_slots(self, count: int) -> torch.Tensor:
        """Return free slots, first the slots of removed rows."""
        reused, self._free = self._free[:count], self._free[count:]
        begin, self._size = self._size, self._size + count - len(reused)
        capacity = len(self._ids)
        if self._size > capacity:
            capacity = max(2 * capacity, self._size)
            self._ids = _grown(self._ids, begin, capacity)
            self._live = _grown(self._live, begin, capacity)
            self.columns = {
                name: _grown(column, begin, capacity) for name, column in self.columns.items()
            }
        return torch.cat([reused, torch.arange(begin, self._size)])


def _grown(tensor: torch.Tensor, used: int, capacity: int) -> torch.Tensor:
    """Return a longer tensor with the used rows copied, and zeros after them."""
    grown = tensor.new_zeros((capacity, *tensor.shape[1:]))
    grown[:used] = tensor[:used]
    return grown
