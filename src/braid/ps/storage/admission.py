"""Admission of ids to a sparse table: only ids that occur repeatedly get a row.

Problem: most ids of logs are seen once or twice. Their rows fill the memory and are hardly trained.

Idea: count the updates with an id, and create its row in the n-th one. Earlier gradients are
dropped. Counts are exact and kept by id, at 40 bytes each, so they move with the shard; the counts
of a smaller sketch would depend on the number of shards.

    update      1    2    3    4          min_pushes 3
    id 17       x         x    x          row created by update 4, which is applied to it
    id 5        x              x          two gradients dropped so far

Source: B. Jiang et al., XDL: an industrial deep learning framework for high-dimensional sparse
data, DLP-KDD 2019 (feature admission).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from braid.errors import ConfigError
from braid.ps.storage.eviction import oldest_slots, stale_slots
from braid.ps.storage.row_table import RowTable, Width

__all__ = ["Admission", "Candidates"]

COUNT, LAST_UPDATE = "count", "last_update"


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Condition on which an id gets a row.

    Attributes:
        min_pushes: Number of updates with the id until its row is created, including the one that
            creates it. Pushes that are merged into one update count once.
        max_candidates: Largest number of ids without a row that a shard counts; the least recently
            pushed ids are removed first.

    Raises:
        ConfigError: A value is not positive.
    """

    min_pushes: int
    max_candidates: int = 1 << 22

    def __post_init__(self) -> None:
        if self.min_pushes < 1 or self.max_candidates < 1:
            msg = (
                "Admission: min_pushes and max_candidates must be at least 1, got "
                f"{self.min_pushes} and {self.max_candidates}"
            )
            raise ConfigError(msg)


class Candidates:
    """Counts of ids that have no row yet.

    Args:
        admission: Condition on which ids get rows; their first update creates them when None.
    """

    def __init__(self, admission: Admission | None) -> None:
        self._admission = admission
        count = Width(1, torch.int64)
        self._table = RowTable({COUNT: count, LAST_UPDATE: count})

    def __len__(self) -> int:
        return len(self._table)

    @property
    def num_bytes(self) -> int:
        """Bytes of all counts."""
        return self._table.num_bytes

    def admit(self, ids: torch.Tensor, update: int) -> torch.Tensor:
        """Count distinct ids without rows, and remove ids that get a row now.

        Args:
            ids: Ids, ascending.
            update: Number of this update.

        Returns:
            Whether each id gets a row now.

        Shape:
            ids and result: [n].
        """
        if self._admission is None or self._admission.min_pushes == 1:
            return torch.ones(len(ids), dtype=torch.bool)
        table = self._table
        slots = table.find(ids)
        new = (slots < 0).nonzero().flatten()
        slots.index_copy_(0, new, table.insert(ids.index_select(0, new)))
        counts = table.columns[COUNT].index_select(0, slots).add_(1)
        table.columns[COUNT].index_copy_(0, slots, counts)
        table.columns[LAST_UPDATE].index_fill_(0, slots, update)
        admitted = counts.flatten() >= self._admission.min_pushes
        table.remove(slots.masked_select(admitted))
        table.remove(oldest_slots(table, self._admission.max_candidates))
        return admitted

    def forget(self, before: int) -> None:
        """Remove ids whose last update has the number `before` or a lower one."""
        self._table.remove(stale_slots(self._table, before))

    def export(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return copies of all ids, ascending, and of their counts and last updates."""
        return self._table.export()

    def load(self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> None:
        """Replace all counts; without an `Admission`, keep none."""
        if self._admission is None:
            ids, columns = ids[:0], {name: column[:0] for name, column in columns.items()}
        self._table.load(ids, columns)
