"""Eviction of rows that updates have not touched for long.

Problem: ids come and go, and a table that keeps each row grows for ever.

Idea: each row keeps the number of the update that touched it last. Rows are chosen by this number
and, where it is equal, by id, so that all replicas choose the same. Reads do not count, since
replicas do not see them. Choosing takes a pass over all rows, so it is done rarely, for several at
a time.

Source: B. Jiang et al., XDL, DLP-KDD 2019 (feature eviction).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from braid.errors import ConfigError
from braid.ps.storage.row_table import RowTable

__all__ = ["Eviction", "oldest_slots", "stale_slots"]

PARTS = 16  # a pass is made for a 16th of the rows, or after a 16th of the updates


@dataclass(frozen=True, kw_only=True, slots=True)
class Eviction:
    """Condition on which rows are removed; an id that returns begins anew, as if never pushed.

    Attributes:
        unused_updates: Updates of the shard without the row, after which it is removed: at the
            latest when a 16th as many more have passed.
        max_rows: Number of rows of a shard. When an update exceeds it, the least recently touched
            rows are removed until a 16th below it is free.

    Raises:
        ConfigError: A value is not positive, or none is given.
    """

    unused_updates: int | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        numbers = [each for each in (self.unused_updates, self.max_rows) if each is not None]
        if not numbers or min(numbers) < 1:
            msg = (
                "Eviction: unused_updates or max_rows must be given, and be at least 1, got "
                f"{self.unused_updates} and {self.max_rows}"
            )
            raise ConfigError(msg)

    def unused_since(self, update: int) -> int | None:
        """Return the last update that is too long ago; None if this update makes no pass."""
        if self.unused_updates is None or update % max(1, self.unused_updates // PARTS):
            return None
        return update - self.unused_updates


def stale_slots(table: RowTable, before: int) -> torch.Tensor:
    """Return the slots of rows whose last update is not after the given one."""
    slots = table.slots()
    return slots.masked_select(table.columns["last_update"].index_select(0, slots)[:, 0] <= before)


def oldest_slots(table: RowTable, max_rows: int | None) -> torch.Tensor:
    """Return the slots of rows to remove from a table that has more than a number of rows.

    Returns:
        Those of the least recent updates, and of equal ones those of the lowest ids; none if the
        table has no more rows than that.
    """
    if max_rows is None or len(table) <= max_rows:
        return torch.empty(0, dtype=torch.int64)
    count = len(table) - max_rows + max_rows // PARTS
    slots = table.slots()
    last = table.columns["last_update"].index_select(0, slots)[:, 0]
    limit = last.kthvalue(count).values
    older, equal = slots.masked_select(last < limit), slots.masked_select(last == limit)
    by_id = equal.index_select(0, table.ids(equal).argsort())
    return torch.cat([older, by_id[: count - len(older)]])
