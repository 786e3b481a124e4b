"""Interface of a server's storage for one shard of a table.

A shard is a part of a table that is moved and replicated as a whole. The protocol decides when
pushes are applied, and on which servers; a storage only checks, adds, steps, reads and exports
tensors.

    push ── check ──┐
    push ── check ──┴─ merge ── update ─┬─ apply       on the head of the chain
                                        └─ apply       on each replica: the same bits

Only merged updates are sent to replicas, so that each push is added once.

Source: M. Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014
(section 4.3: replication after aggregation).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from braid.errors import ConfigError

__all__ = ["State", "Storage", "Tensors"]

Tensors: TypeAlias = tuple[torch.Tensor, ...]
State: TypeAlias = dict[str, torch.Tensor]


class Storage(ABC):
    """Values, optimizer state and counts of one shard of a table.

    Methods other than `check` and `check_query` require checked tensors.

    Attributes:
        table: Name of the table, for messages.
    """

    table: str

    @abstractmethod
    def check(self, push: Tensors) -> None:
        """Check the tensors of a push.

        Raises:
            ConfigError: Number, dtypes or shapes of the tensors do not fit the table.
        """

    @abstractmethod
    def check_query(self, query: Tensors) -> None:
        """Check the tensors of a query.

        Raises:
            ConfigError: Number, dtypes or shapes of the tensors do not fit the table.
        """

    @abstractmethod
    def merge(self, pushes: Sequence[Tensors], scale: float) -> Tensors:
        """Add pushes in the given order, and scale the sum once.

        Args:
            pushes: At least one push. Do not use the first one afterwards, since the result may
                share its memory.
            scale: Factor of the sum.

        Returns:
            An update for `apply`, bitwise the same for the same arguments.
        """

    @abstractmethod
    def apply(self, update: Tensors) -> None:
        """Take one step of the optimizer with a merged update.

        The storage never writes to the update, but may keep it: do not change it afterwards. The
        same updates in the same order give bitwise the same values on all replicas.
        """

    @abstractmethod
    def read(self, query: Tensors) -> Tensors:
        """Return values to send.

        Later calls of `apply` do not change them, and the caller must not change them.
        """

    @abstractmethod
    def export(self) -> State:
        """Return a copy of the whole state by name: values, optimizer state and counts."""

    @abstractmethod
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the whole state by a copy of an exported state.

        Raises:
            ConfigError: Names, dtypes or shapes do not fit the table. The old state is unchanged.
        """

    @abstractmethod
    def statistics(self) -> dict[str, int]:
        """Return counts by name, including `num_updates` and `num_bytes`."""

    @property
    def lr(self) -> float | None:
        """Learning rate; None without an optimizer."""
        return None

    def set_lr(self, lr: float) -> None:
        """Change the learning rate, which is part of the exported state.

        Raises:
            ConfigError: The table has no optimizer, or the rate is out of range.
        """
        self.check_lr(lr)

    def check_lr(self, lr: float) -> None:
        """Check a learning rate before it is announced to other nodes; see `set_lr`."""
        msg = (
            f"table {self.table!r} has no optimizer, so its learning rate cannot be set to {lr}: "
            "pass an optimizer when the table is declared"
        )
        raise ConfigError(msg)
