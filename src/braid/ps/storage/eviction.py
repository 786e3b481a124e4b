"""Eviction of rows that have not been updated for a long time.

Problem: ids come and go, and a table that keeps every row grows without bound.

Idea: each row stores the number of its last update. Rows are selected by this number, and by id if
it is equal, so that all replicas select the same rows. Reads do not count, since replicas do not
see them. A selection passes over all rows, so it happens rarely, and removes several rows.

Source: B. Jiang et al., XDL, DLP-KDD 2019 (feature eviction).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from braid.errors import ConfigError
from braid.ps.storage.row_table import RowTable

__all__ = ["Eviction", "oldest_slots", "stale_slots"]

PARTS = 16  # a pass removes 1/16 of the rows, or happens every 1/16 of `unused_updates`


@dataclass(frozen=True, kw_only=True, slots=True)
class Eviction:
    """Condition on which rows are removed; a removed id begins again with its initial values.

    Attributes:
        unused_updates: Number of updates of the shard without the row after which it is removed,
            at most 1/16 later.
        max_rows: Largest number of rows of a shard. When an update exceeds it, the least recently
            updated rows are removed until 1/16 of `max_rows` is free.

    Raises:
        ConfigError: A value is not positive, or both are None.
    """

    unused_updates: int | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        limits = self.unused_updates, self.max_rows
        numbers = [limit for limit in limits if limit is not None]
        if not numbers or min(numbers) < 1:
            msg = (
                "Eviction: unused_updates or max_rows must be given, and be at least 1, got "
                f"{self.unused_updates} and {self.max_rows}"
            )
            raise ConfigError(msg)

    def unused_since(self, update: int) -> int | None:
        """Return the last update that makes a row too old at `update`; None if no check is due."""
        if self.unused_updates is None or update % max(1, self.unused_updates // PARTS):
            return None
        return update - self.unused_updates


def stale_slots(table: RowTable, before: int) -> torch.Tensor:
    """Return the slots of rows whose last update has the number `before` or a lower one."""
    slots = table.slots()
    return slots.masked_select(table.columns["last_update"].index_select(0, slots)[:, 0] <= before)


def oldest_slots(table: RowTable, max_rows: int | None) -> torch.Tensor:
    """Return the slots of the rows to remove from a table with more than `max_rows` rows.

    Returns:
        Slots of the least recently updated rows, ties broken by the lowest id; empty if the table
        is not larger.
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
