"""Source of slots: how many ranks may take part in an elastic run, while it goes on."""

from __future__ import annotations

from typing import Protocol

__all__ = ["SlotSource"]


class SlotSource(Protocol):
    """Source of the number of ranks that may run, such as a script that lists hosts."""

    @property
    def deadline_ns(self) -> int:
        """Time at which `poll` is due."""
        ...

    def poll(self) -> tuple[int | None, str]:
        """Return the number of places if it changed, and a notice for the user; never block."""
        ...

    def lost(self) -> None:
        """Record that a rank has died, so that its slot may be unusable."""
        ...
