"""When to look for a hang, when to ask ranks for their stacks, and when to speak again: a state machine.

Problem: a report that comes once is overlooked, one that comes every second hides everything else,
and one that comes while all ranks compute is worse than none. Idea: reports of one place come at
growing distances, those of another place at once; asking ranks for their stacks costs them
something, so it is done only when a wait is long enough.

    phase       event                                               instructions      next
    WATCHING    it is time                                          Look              same
    WATCHING    Looked: a wait is older than the limit, and its     AskStacks         ASKED until +0.25 s
                place is due
    ASKED       it is time, and all have answered                   Report            WATCHING
    ASKED       it is time, and some have not                       -                 ASKED until +0.12 s, eight times at most
    WATCHING    Reported: somebody is stuck                         -                 that place: not before 2, 6, 18, ... limits
    WATCHING    Reported: nobody is                                 -                 that place: not before 1 limit
    WATCHING    Looked: the waits of the last report are over       Resume            same
    any         all ranks have ended well, who were waiting         Resume            same

The first collective of a channel is given three limits: ranks that start together do not arrive
together.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple, TypeAlias

__all__ = ["AskStacks", "HangState", "Instruction", "Look", "OpenWait", "Report", "Resume"]

LOOK_NS = 1_000_000_000
LOOKS_PER_LIMIT = 2  # a wait is seen at most half a limit late
STACKS_NS = 250_000_000  # faulthandler needs microseconds, and a rank may be waiting for a core
LATE_NS = 1_000_000_000  # what an answer from another host may take longer
START_LIMITS = 3
GROWTH = 3


class OpenWait(NamedTuple):
    """A collective that a rank has begun and not ended.

    Attributes:
        rank: The rank.
        place: Digest of its call site, or of its name.
        seq: Its number on its channel, from 1.
        t_ns: Begin.
    """

    rank: int
    place: int
    seq: int
    t_ns: int


class Look(NamedTuple):
    """Look what ranks are inside of, and answer with `looked`."""


class AskStacks(NamedTuple):
    """StackRequest all ranks for their stacks, and note what their processes have used so far."""


class Report(NamedTuple):
    """Make a report, and answer with `reported`."""


class Resume(NamedTuple):
    """SendToRank that what was reported is over.

    Attributes:
        waits: What is over, as far as it was reported.
    """

    waits: tuple[OpenWait, ...]


Instruction: TypeAlias = Look | AskStacks | Report | Resume


class _Phase(Enum):
    WATCHING = "watching"
    ASKED = "asked"


class _Place(NamedTuple):
    """Not before when, and how many limits later the next time."""

    due_ns: int
    limits: int


class HangState:
    """Decides when.

    Args:
        limit_ns: How long a rank may wait before it is reported; 0 for never.
        now_ns: Now.
    """

    def __init__(self, limit_ns: int, now_ns: int) -> None:
        self._limit_ns = limit_ns
        self._look_ns = min(LOOK_NS, limit_ns // LOOKS_PER_LIMIT)
        self._next_ns = now_ns + self._look_ns
        self._phase = _Phase.WATCHING
        self._places: dict[int, _Place] = {}
        self._asked: tuple[OpenWait, ...] = ()
        self._latest_ns = 0  # of the report
        self._told: frozenset[OpenWait] = frozenset()

    @property
    def deadline_ns(self) -> int | None:
        """When `tick` is due; None when reports are off."""
        return self._next_ns if self._limit_ns else None

    def tick(self, now_ns: int, *, answered: bool = True) -> list[Instruction]:
        """Time has passed; `answered` tells whether all ranks that were asked for their stacks have."""
        if not self._limit_ns or now_ns < self._next_ns:
            return []
        if self._phase is _Phase.ASKED and not answered and now_ns < self._latest_ns:
            self._next_ns = now_ns + LATE_NS // 8
            return []
        self._next_ns = now_ns + self._look_ns
        if self._phase is _Phase.ASKED:
            self._phase = _Phase.WATCHING
            return [Report()]
        return [Look()]

    def looked(self, waits: Iterable[OpenWait], now_ns: int) -> list[Instruction]:
        """What all ranks are inside of now."""
        present = frozenset(waits)
        out = self._over() if not self._told & present else []
        old = tuple(wait for wait in present if now_ns - wait.t_ns >= self._patience_ns(wait))
        self._forget({wait.place for wait in present}, now_ns)
        if any(now_ns >= self._due_ns(wait) for wait in old):
            self._asked, self._phase = old, _Phase.ASKED
            self._next_ns = now_ns + STACKS_NS
            self._latest_ns = self._next_ns + LATE_NS
            out.append(AskStacks())
        return out

    def all_ended_well(self) -> list[Instruction]:
        """Nobody waits any more, and nobody will look again."""
        return self._over()

    def reported(self, ranks: Iterable[int], now_ns: int) -> None:
        """What came of `Report`: the ranks that are stuck, none when it was a false alarm."""
        stuck = frozenset(ranks)
        if stuck:
            self._told = frozenset(wait for wait in self._asked if wait.rank in stuck)
        for place in {wait.place for wait in self._asked}:
            before = self._places.get(place)
            limits = before.limits if before is not None else 1
            distance = 2 * limits if stuck else 1
            later = GROWTH * limits if stuck else limits
            self._places[place] = _Place(now_ns + distance * self._limit_ns, later)

    def _over(self) -> list[Instruction]:
        told, self._told = self._told, frozenset()
        return [Resume(tuple(sorted(told)))] if told else []

    def _patience_ns(self, wait: OpenWait) -> int:
        return self._limit_ns * (START_LIMITS if wait.seq <= 1 else 1)

    def _due_ns(self, wait: OpenWait) -> int:
        place = self._places.get(wait.place)
        return place.due_ns if place is not None else 0

    def _forget(self, present: set[int], now_ns: int) -> None:
        """A place where nobody has been waiting for as long as the last distance starts anew."""
        self._places = {
            place: facts
            for place, facts in self._places.items()
            if place in present or now_ns < facts.due_ns
        }
