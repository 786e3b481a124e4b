"""Source of slots: how many ranks of an elastic run each host may have, while the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

__all__ = ["SlotSource"]


class SlotSource(Protocol):
    """Source of the number of ranks that may run, such as a script that lists hosts."""

    @property
    def hosts(self) -> Mapping[str, int]:
        """Number of slots of each host; the host's name is empty if the run has no agents."""

    @property
    def deadline_ns(self) -> int:
        """Time at which `poll` is due."""

    def poll(self) -> tuple[bool, str]:
        """Update `hosts` without blocking; return whether they have changed, and a notice."""

    def lost(self, host: str, *, is_gone: bool = False) -> None:
        """Record that a rank on a host has died, so that its slot may be unusable.

        If `is_gone`, the host itself was lost or cannot be reached.
        """
