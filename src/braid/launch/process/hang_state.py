"""State machine that decides when to look for hangs, request stacks and print reports.

Problem: a single report is overlooked, a report every second hides everything else, and a report
while all ranks compute is worse than none.

Idea: repeat the reports of one call site at growing intervals, and report a new site immediately.
Request stacks only when a wait is long enough, because they cost the ranks time.

    phase  event                                           instruction  next
    IDLE   time to look                                    Look         same
    IDLE   looked: a wait exceeds the limit, its site      AskStacks    ASKED until +0.25 s
           is due
    ASKED  time is up, all ranks have answered             ReportHang   IDLE
    ASKED  time is up, some ranks have not                 -            ASKED until +0.12 s, at
                                                                        most eight times
    IDLE   reported: some ranks are stuck                  -            site not before 2, 6, 18,
                                                                        ... limits
    IDLE   reported: no rank is stuck                      -            site not before 1 limit
    IDLE   looked: the reported waits are over             Resume       same
    any    all ranks ended well after a report of waits    Resume       same

The first collective of a channel is given three limits, because ranks that start together do not
arrive together.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple, TypeAlias

__all__ = ["AskStacks", "HangState", "Instruction", "Look", "OpenWait", "ReportHang", "Resume"]

LOOK_NS = 1_000_000_000
LOOKS_PER_LIMIT = 2  # a wait is noticed at most half a limit late
STACKS_NS = 250_000_000  # faulthandler needs microseconds, but a rank may be waiting for a core
LATE_NS = 1_000_000_000  # additional time for an answer from another host
START_LIMITS = 3
GROWTH = 3


class OpenWait(NamedTuple):
    """A collective that a rank has begun and not ended.

    Attributes:
        rank: Rank that waits.
        place: Digest of the call site, or of the collective's name.
        seq: Number of the collective on its channel, from 1.
        t_ns: Begin of the collective.
    """

    rank: int
    place: int
    seq: int
    t_ns: int


class Look(NamedTuple):
    """Instruction: collect the open collectives of all ranks and pass them to `looked`."""


class AskStacks(NamedTuple):
    """Instruction: request stacks from all ranks and sample the resource use of their processes."""


class ReportHang(NamedTuple):
    """Instruction: make a hang report and pass the stuck ranks to `HangState.reported`."""


class Resume(NamedTuple):
    """Instruction: notify the user that reported waits are over.

    Attributes:
        waits: The reported waits that have ended.
    """

    waits: tuple[OpenWait, ...]


Instruction: TypeAlias = Look | AskStacks | ReportHang | Resume


class _Phase(Enum):
    IDLE = "idle"
    ASKED = "asked"


class _ReportTimes(NamedTuple):
    """Report times of one call site.

    Attributes:
        due_ns: Time before which the site is not reported again.
        limits: Interval after the next report, in multiples of the limit.
    """

    due_ns: int
    limits: int


class HangState:
    """Decides when to look for hangs and when to report them.

    Args:
        limit_ns: Longest wait of a rank that is not reported; 0 turns reports off.
        now_ns: Current time.
    """

    def __init__(self, limit_ns: int, now_ns: int) -> None:
        self._limit_ns = limit_ns
        self._look_ns = min(LOOK_NS, limit_ns // LOOKS_PER_LIMIT)
        self._next_ns = now_ns + self._look_ns
        self._phase = _Phase.IDLE
        self._places: dict[int, _ReportTimes] = {}
        self._asked: tuple[OpenWait, ...] = ()
        self._latest_ns = 0  # deadline of the pending report
        self._reported: frozenset[OpenWait] = frozenset()

    @property
    def deadline_ns(self) -> int | None:
        """Time at which `tick` is due; None when reports are off."""
        return self._next_ns if self._limit_ns else None

    def tick(self, now_ns: int, *, answered: bool = True) -> list[Instruction]:
        """Advance to time `now_ns`; return the instructions that are due.

        Args:
            now_ns: Current time.
            answered: Whether all ranks have answered the last request for stacks.
        """
        if not self._limit_ns or now_ns < self._next_ns:
            return []
        if self._phase is _Phase.ASKED and not answered and now_ns < self._latest_ns:
            self._next_ns = now_ns + LATE_NS // 8
            return []
        self._next_ns = now_ns + self._look_ns
        if self._phase is _Phase.ASKED:
            self._phase = _Phase.IDLE
            return [ReportHang()]
        return [Look()]

    def looked(self, waits: Iterable[OpenWait], now_ns: int) -> list[Instruction]:
        """Process the collectives that a `Look` found in progress; return the instructions."""
        present = frozenset(waits)
        out = self._over() if not self._reported & present else []
        old = tuple(wait for wait in present if now_ns - wait.t_ns >= self._patience_ns(wait))
        self._forget({wait.place for wait in present}, now_ns)
        if any(now_ns >= self._due_ns(wait) for wait in old):
            self._asked, self._phase = old, _Phase.ASKED
            self._next_ns = now_ns + STACKS_NS
            self._latest_ns = self._next_ns + LATE_NS
            out.append(AskStacks())
        return out

    def all_ended_well(self) -> list[Instruction]:
        """End the reported waits, since all ranks ended well; return the instructions."""
        return self._over()

    def reported(self, ranks: Iterable[int], now_ns: int) -> None:
        """Process the result of the instruction `ReportHang`.

        Args:
            ranks: Ranks that are stuck; empty for a false alarm.
            now_ns: Current time.
        """
        stuck = frozenset(ranks)
        if stuck:
            self._reported = frozenset(wait for wait in self._asked if wait.rank in stuck)
        for place in {wait.place for wait in self._asked}:
            before = self._places.get(place)
            limits = before.limits if before is not None else 1
            distance = 2 * limits if stuck else 1
            later = GROWTH * limits if stuck else limits
            self._places[place] = _ReportTimes(now_ns + distance * self._limit_ns, later)

    def _over(self) -> list[Instruction]:
        waits, self._reported = self._reported, frozenset()
        return [Resume(tuple(sorted(waits)))] if waits else []

    def _patience_ns(self, wait: OpenWait) -> int:
        return self._limit_ns * (START_LIMITS if wait.seq <= 1 else 1)

    def _due_ns(self, wait: OpenWait) -> int:
        place = self._places.get(wait.place)
        return place.due_ns if place is not None else 0

    def _forget(self, present: set[int], now_ns: int) -> None:
        """Forget call sites at which no rank has waited for as long as their last interval."""
        self._places = {
            place: facts
            for place, facts in self._places.items()
            if place in present or now_ns < facts.due_ns
        }
