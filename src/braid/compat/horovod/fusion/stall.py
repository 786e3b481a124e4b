"""Stalls: names that some ranks have not submitted, which are reported and then fatal. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

__all__ = ["Stall", "StallInspector"]

Waiting = Mapping[str, tuple[list[int], float]]


class Stall(msgspec.Struct, frozen=True, array_like=True):
    """One operation that some ranks have submitted and others have not.

    Attributes:
        name: Name of the requests.
        waited_s: Seconds since the first request.
        present: Global ranks that have submitted the name.
        missing: Global ranks that have not submitted the name.
    """

    name: str
    waited_s: float
    present: tuple[int, ...]
    missing: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.name!r} has waited for {self.waited_s:.0f} s: submitted by rank "
            f"{', '.join(map(str, self.present))}, "
            f"not by rank {', '.join(map(str, self.missing))}"
        )


class StallInspector:
    """Finds stalls, and reports each one every `check_s` seconds.

    Args:
        check_s: Seconds of waiting until a report; 0 never reports.
        shutdown_s: Seconds of waiting until a shutdown; 0 for never.
        ranks: Global ranks by position.
    """

    def __init__(self, check_s: float, shutdown_s: float, ranks: Sequence[int]) -> None:
        self._check_s = check_s
        self._shutdown_s = shutdown_s
        self._ranks = tuple(ranks)
        self._reported_s: dict[str, float] = {}

    def is_due(self, waiting: Waiting, now_s: float) -> bool:
        """Return whether there is a stall to report."""
        return any(self._is_due(name, since_s, now_s) for name, (_, since_s) in waiting.items())

    def inspect(
        self, waiting: Waiting, joined: Collection[int], now_s: float
    ) -> tuple[list[Stall], str]:
        """Return the stalls to report now, and the reason for a shutdown; empty for none.

        Args:
            waiting: For each name, the ranks that have submitted it, and its first request's time.
            joined: Positions of ranks that have joined.
            now_s: Current time in seconds.
        """
        self._reported_s = {
            name: reported_s for name, reported_s in self._reported_s.items() if name in waiting
        }
        stalls, fatal = [], ""
        for name, (have, since_s) in waiting.items():
            if not self._is_due(name, since_s, now_s):
                continue
            self._reported_s[name] = now_s
            present = tuple(self._ranks[p] for p in have)
            absent = set(range(len(self._ranks))).difference(have, joined)
            missing = tuple(self._ranks[p] for p in sorted(absent))
            stall = Stall(name, now_s - since_s, present, missing)
            stalls.append(stall)
            if self._shutdown_s and stall.waited_s >= self._shutdown_s:
                fatal = fatal or f"stalled for more than {self._shutdown_s:g} s: {stall}"
        return stalls, fatal

    def _is_due(self, name: str, since_s: float, now_s: float) -> bool:
        if self._shutdown_s and now_s - since_s >= self._shutdown_s:
            return True
        last_s = self._reported_s.get(name, since_s)
        return bool(self._check_s) and now_s - last_s >= self._check_s

    def __repr__(self) -> str:
        return f"StallInspector(check {self._check_s:g} s, shutdown {self._shutdown_s:g} s)"
