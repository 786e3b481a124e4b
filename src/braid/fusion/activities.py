"""What a batch spends its time with: noted for the trace, and kept for a timeline while there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from braid.clock import Clock
from braid.events import Recorder

__all__ = ["Activities", "Activity"]


class Activity(NamedTuple):
    """Something that took time.

    Attributes:
        name: Such as "copy in", "transfer", "copy out".
        start_ns: On the rank's clock.
        end_ns: Likewise.
    """

    name: str
    start_ns: int
    end_ns: int


class Activities:
    """Notes of one thread.

    Args:
        events: The rank's trace.
        clock: The rank's clock.
    """

    def __init__(self, events: Recorder, clock: Clock) -> None:
        self._events = events
        self._now_ns = clock.now_ns
        self.kept: list[Activity] | None = None  # a list while somebody wants them

    @contextlib.contextmanager
    def span(self, name: str, nbytes: int) -> Iterator[None]:
        """Note what happens inside."""
        start_ns = self._now_ns()
        with self._events.span(name, nbytes=nbytes):
            yield
        if self.kept is not None:
            self.kept.append(Activity(name, start_ns, self._now_ns()))
