"""Waits for streams: without sleep for a moment, while answers come soon.

Problem: a core that sleeps takes longer to wake than a small message and its answer take together.
A thread that never sleeps takes the core that its peer needs.

Idea: after a short wait, the next one looks again and again for `LOOK_NS` before it sleeps, and
yields the core between two looks. After a long wait, it sleeps at once.
"""

from __future__ import annotations

import os
import time

from braid.message.vans.poller import Poller

__all__ = ["LOOK_NS", "Looking"]

LOOK_NS = 300_000  # somewhat more than a small call and its answer take


class Looking:
    """Waits on a poller; one thread at a time.

    Args:
        poller: The poller.
    """

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._was_short = False

    def wait(self, pause_s: float | None) -> list[tuple[int, int]]:
        """Return what is ready, after `pause_s` at the latest; see `Poller.wait`."""
        look = self._poller.wait
        ready = look(0)
        if ready or pause_s == 0:
            self._was_short = True
            return ready
        begin_ns = time.perf_counter_ns()
        if self._was_short:
            while not ready and time.perf_counter_ns() - begin_ns < LOOK_NS:
                os.sched_yield()
                ready = look(0)
        ready = ready or look(pause_s)
        self._was_short = time.perf_counter_ns() - begin_ns < 2 * LOOK_NS
        return ready
