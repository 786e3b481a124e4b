"""What can be seen of a rank from outside, by whoever shares its host: its open spans, its stack, what the kernel says."""

from __future__ import annotations

from signal import SIGUSR1
from typing import NamedTuple

from braid.clock import Clock
from braid.diagnose import RankView, SpanView
from braid.events import Event, EventRing
from braid.launch.process.black_box import BlackBox
from braid.launch.process.hang_state import OpenWait
from braid.launch.process.process_facts import Sample, catches, process_between, sample
from braid.launch.process.processes import send_signal

__all__ = ["RankObserver"]

HISTORY = 4096  # records of a rank that a report looks at; some 4 ms each


class _Asked(NamedTuple):
    """What was noted when it was asked for its stack."""

    stacks_from: int
    sample: Sample
    now_ns: int


class RankObserver:
    """Looks at one rank.

    Args:
        rank: Its rank.
        pid: Its process.
        box: Its black box; not owned.
        clock: Time source, that of its events.
    """

    def __init__(self, rank: int, pid: int, box: BlackBox, clock: Clock) -> None:
        self._rank = rank
        self._pid = pid
        self._box = box
        self._clock = clock
        self._asked: _Asked | None = None

    def waits(self) -> list[OpenWait]:
        """Collectives that it is inside of; quick enough to be asked for every second."""
        if not self._box.has_events:
            return []
        ring = self._box.ring
        return [
            OpenWait(self._rank, event.site or event.kind, event.seq, event.t_ns)
            for event in self._box.open_spans()
            if event.group and "(" in ring.name(event.kind)
        ]

    def ask(self, *, alive: bool, answers: bool) -> None:
        """StackRequest it for its stack, and note what it has used so far.

        Args:
            alive: Whether its process has not ended.
            answers: Whether it has joined the job; without a handler the signal would end it.
        """
        seen = sample(self._pid) if alive else Sample()
        self._asked = _Asked(self._box.stacks_size, seen, self._clock.now_ns())
        if answers and alive and catches(seen, SIGUSR1):  # it may have left the job since
            send_signal(self._pid, SIGUSR1)

    def view(self, *, alive: bool, ended: str = "") -> RankView:
        """What is known of it, with the stack that it was asked for.

        Args:
            alive: Whether its process has not ended.
            ended: How it ended, in words.
        """
        ring, asked = self._box.ring, self._asked
        # a span that ends between the two looks is seen once, as ended
        events = {e._replace(dur_ns=0): e for e in self._box.open_spans()}
        events.update((e._replace(dur_ns=0), e) for e in ring.tail(HISTORY))
        spans = tuple(_worded(event, ring) for event in sorted(events.values()))
        view = RankView(self._rank, self._pid, spans, ended=ended)
        if asked is None or not alive:
            return view
        elapsed_ns = self._clock.now_ns() - asked.now_ns
        return view._replace(
            process=process_between(asked.sample, sample(self._pid), elapsed_ns),
            stack=self._box.stacks(asked.stacks_from),
        )

    def lasted_ns(self, wait: OpenWait) -> int | None:
        """How long a wait took, from the record; None where it is not over or not known any more."""
        events = self._box.ring.tail(HISTORY)
        return next((e.dur_ns for e in events if e.t_ns == wait.t_ns and not e.open), None)


def _worded(event: Event, ring: EventRing) -> SpanView:
    name, site = ring.name(event.kind), ring.name(event.site)
    return SpanView(name, event.t_ns, event.dur_ns, event.group, event.channel, event.seq, site)
