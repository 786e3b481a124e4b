"""Activities of a batch: recorded for the trace, and kept for a timeline while there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from braid.runtime.clock import Clock
from braid.runtime.events import Recorder

__all__ = ["Activities", "Activity"]


class Activity(NamedTuple):
    """One thing that took time.

    Attributes:
        name: Name, such as "copy in", "transfer", "copy out".
        start_ns: Start on the rank's clock.
        end_ns: End on the rank's clock.
    """

    name: str
    start_ns: int
    end_ns: int


class Activities:
    """Records activities of one thread.

    Args:
        events: Trace of the rank.
        clock: Clock of the rank.

    Attributes:
        records: Activities so far while they are wanted; None otherwise.
    """

    def __init__(self, events: Recorder, clock: Clock) -> None:
        self._events = events
        self._now_ns = clock.now_ns
        self.records: list[Activity] | None = None

    @contextlib.contextmanager
    def span(self, name: str, nbytes: int) -> Iterator[None]:
        """Record the context as one activity."""
        start_ns = self._now_ns()
        with self._events.span(name, nbytes=nbytes):
            yield
        if self.records is not None:
            self.records.append(Activity(name, start_ns, self._now_ns()))
