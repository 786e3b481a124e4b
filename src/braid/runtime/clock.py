"""Time as an argument.

Code that waits gets a `Clock` as an argument. Programs use `MonotonicClock`; tests of deadlines,
heartbeats and rate limits use `VirtualClock`, which advances only on request, so no test sleeps.

`CLOCK_MONOTONIC` is shared by all processes of a host, so events of ranks of one host need no
adjustment.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "MonotonicClock", "VirtualClock"]


class Clock(Protocol):
    """Source of time: monotonic, in nanoseconds, with an arbitrary origin."""

    def now_ns(self) -> int:
        """Return nanoseconds since an arbitrary fixed origin; never decreases."""

    def after_ns(self, duration_s: float) -> int:
        """Return the time `duration_s` seconds from now, such as a deadline."""

    def sleep(self, duration_s: float) -> None:
        """Block for `duration_s` seconds."""


class MonotonicClock:
    """Monotonic clock of this host."""

    now_ns = staticmethod(time.monotonic_ns)
    sleep = staticmethod(time.sleep)

    def after_ns(self, duration_s: float) -> int:
        """Return the time `duration_s` seconds from now; see `Clock.after_ns`."""
        return time.monotonic_ns() + round(duration_s * 1e9)

    def __repr__(self) -> str:
        return "MonotonicClock()"


class VirtualClock:
    """Clock that advances only by `advance` and `sleep`.

    >>> clock = VirtualClock()
    >>> clock.sleep(1.5)
    >>> clock.now_ns()
    1500000000
    """

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """Return nanoseconds since the start of this clock."""
        return self._now_ns

    def after_ns(self, duration_s: float) -> int:
        """Return the time `duration_s` seconds from now; see `Clock.after_ns`."""
        return self._now_ns + round(duration_s * 1e9)

    def sleep(self, duration_s: float) -> None:
        """Advance by `duration_s` seconds without blocking."""
        self.advance(round(duration_s * 1e9))

    def advance(self, duration_ns: int) -> None:
        """Advance by `duration_ns` nanoseconds."""
        self._now_ns += duration_ns

    def __repr__(self) -> str:
        return f"VirtualClock(now_ns={self._now_ns})"
