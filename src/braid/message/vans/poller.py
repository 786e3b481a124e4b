"""Waits until descriptors can be read or written; `selectors` without its work for each wait."""

from __future__ import annotations

import contextlib
import math
import select

__all__ = ["READABLE", "WRITABLE", "Poller"]

READABLE, WRITABLE = select.POLLIN, select.POLLOUT
_HAS_EPOLL = hasattr(select, "epoll")  # whose cost does not grow with the number of descriptors


class Poller:
    """Descriptors, and the events for which each is polled."""

    def __init__(self) -> None:
        self._poll = select.epoll() if _HAS_EPOLL else select.poll()

    def register(self, fd: int, events: int) -> None:
        """Add a descriptor."""
        self._poll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        """Change the events of a descriptor."""
        self._poll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """Remove a descriptor; if it is closed already, the system has done so."""
        with contextlib.suppress(OSError):
            self._poll.unregister(fd)

    def wait(self, pause_s: float | None) -> list[tuple[int, int]]:
        """Return the descriptors that are ready, with their events.

        An error or the end of a stream is an event of its own, beside those that were asked for.

        Args:
            pause_s: Longest wait; None for no limit.
        """
        if pause_s is None:
            return self._poll.poll()
        return self._poll.poll(pause_s if _HAS_EPOLL else math.ceil(pause_s * 1e3))

    def close(self) -> None:
        """Close what the system keeps for it."""
        if _HAS_EPOLL and isinstance(self._poll, select.epoll):
            self._poll.close()
