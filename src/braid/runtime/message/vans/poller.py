"""Poller of descriptors; like `selectors`, with less work for each wait.

Problem: a sleeping core takes longer to wake than a small message and its answer take together. A
thread that never sleeps takes the core that its peer needs.

Idea: after a short wait, the next wait of `Looking` polls repeatedly for `LOOK_NS` before it
sleeps, and yields the core between two polls. After a long wait, it sleeps immediately.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from functools import partial

__all__ = ["READABLE", "WRITABLE", "Looking", "Poller"]

READABLE, WRITABLE = select.POLLIN, select.POLLOUT
_HAS_EPOLL = hasattr(select, "epoll")  # its cost does not grow with the number of descriptors


class Poller:
    """Set of descriptors, with the polled events of each.

    Attributes:
        look: Function that returns the descriptors that are ready now; see `wait`.
    """

    def __init__(self) -> None:
        poll = select.epoll() if _HAS_EPOLL else select.poll()
        self._poll, self.look = poll, partial(poll.poll, 0)

    def register(self, fd: int, events: int) -> None:
        """Add the descriptor `fd`, to poll it for `events`."""
        self._poll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        """Change the events for which a descriptor is polled."""
        self._poll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """Remove a descriptor; does nothing for a closed one, which the system has removed."""
        with contextlib.suppress(OSError):
            self._poll.unregister(fd)

    def wait(self, pause_s: float | None) -> list[tuple[int, int]]:
        """Return the descriptors that are ready, with their events.

        An error or the end of a stream is a separate event, besides the registered events.

        Args:
            pause_s: Longest wait; None for no limit.
        """
        if pause_s is None:
            return self._poll.poll()
        return self._poll.poll(pause_s if _HAS_EPOLL else math.ceil(pause_s * 1e3))

    def close(self) -> None:
        """Release the system's resources."""
        if _HAS_EPOLL and isinstance(self._poll, select.epoll):
            self._poll.close()


LOOK_NS = 300_000  # somewhat longer than a small call and its answer


class Looking:
    """Poller that polls repeatedly before it sleeps; for one thread at a time.

    Args:
        poller: The poller.
    """

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._was_short = False

    def wait(self, pause_s: float | None) -> list[tuple[int, int]]:
        """Return the ready descriptors within `pause_s`; see `Poller.wait`."""
        look = self._poller.look
        ready = look()
        if ready or pause_s == 0:
            self._was_short = True
            return ready
        begin_ns = time.perf_counter_ns()
        if self._was_short:
            while not ready and time.perf_counter_ns() - begin_ns < LOOK_NS:
                os.sched_yield()
                ready = look()
        ready = ready or self._poller.wait(pause_s)
        self._was_short = time.perf_counter_ns() - begin_ns < 2 * LOOK_NS
        return ready
