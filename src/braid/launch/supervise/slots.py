"""Source of slots: how many ranks may take part in an elastic run, while it goes on."""

from __future__ import annotations

from typing import Protocol

__all__ = ["SlotSource"]


class SlotSource(Protocol):
    """Something that knows the number of slots, such as a script that lists hosts."""

    @property
    def deadline_ns(self) -> int:
        """Time at which `poll` is due."""
        ...

    def poll(self) -> tuple[int | None, str]:
        """Return the number of slots if it has changed, and a notice for the user; never block."""
        ...

    def lost(self) -> None:
        """Note that a rank has died in its slot."""
        ...
