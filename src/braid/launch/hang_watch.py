"""Watches a run for ranks that stand still, and reports who they wait for.

Everything is read from outside: event rings in memory of the launcher's, /proc, and stacks that a signal handler of the
rank's dumps into a descriptor of the launcher's, which works while the rank holds the interpreter's lock. A rank pays
for its stack, once per report, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from signal import SIGUSR1
from typing import NamedTuple

from braid.clock import Clock
from braid.diagnose import HangReport, RankView, SpanView, clause, find_hang, rank_list
from braid.events import Event, EventRing
from braid.launch.hang_state import (
    AskStacks,
    HangState,
    Instruction,
    Look,
    OpenWait,
    Report,
    Resume,
)
from braid.launch.process_facts import Sample, catches, process_between, sample
from braid.launch.rank_process import RankProcess

__all__ = ["HangWatch"]

HISTORY = 4096  # records of a rank that a report looks at; some 4 ms each


class _Asked(NamedTuple):
    """What was noted of a rank when it was asked for its stack."""

    stacks_from: int
    sample: Sample
    now_ns: int


class HangWatch:
    """Looks, asks and reports; which of it when is decided by `HangState`.

    Args:
        limit_s: How long a rank may wait before it is reported; 0 for never.
        ranks: The ranks that have been started; may grow.
        clock: Time source, that of the ranks' events.
        log_dir: Where reports are written as `hang-<n>.txt`.
        notice: Shows a text to the user.

    Attributes:
        reports: Texts of all reports so far.
    """

    def __init__(
        self,
        limit_s: float,
        ranks: Mapping[int, RankProcess],
        *,
        clock: Clock,
        log_dir: Path,
        notice: Callable[[str], None],
    ) -> None:
        self.reports: list[str] = []
        self._limit_ns = round(limit_s * 1e9)
        self._ranks = ranks
        self._clock = clock
        self._log_dir = log_dir
        self._notice = notice
        self._state = HangState(self._limit_ns, clock.now_ns())
        self._asked: dict[int, _Asked] = {}
        self._last: HangReport | None = None

    @property
    def deadline_ns(self) -> int | None:
        """When `attend` is due; None when reports are off."""
        return self._state.deadline_ns

    def attend(self) -> None:
        """Do what is due.

        Raises:
            OSError: A report cannot be written; it has been shown.
        """
        now_ns = self._clock.now_ns()
        for instruction in self._state.tick(now_ns):
            self._obey(instruction, now_ns)

    def _obey(self, instruction: Instruction, now_ns: int) -> None:
        if isinstance(instruction, Look):
            for answer in self._state.looked(self._waits(), now_ns):
                self._obey(answer, now_ns)
        elif isinstance(instruction, AskStacks):
            self._asked = {rank: self._ask(process) for rank, process in self._ranks.items()}
        elif isinstance(instruction, Resume):
            self._resume(instruction)
        elif isinstance(instruction, Report):
            report = find_hang(
                [self._view(process) for process in self._ranks.values()],
                now_ns=now_ns,
                limit_ns=self._limit_ns,
            )
            self._state.reported(report.waiting_ranks if report else (), now_ns)
            if report is not None:
                self._show(report)

    def _waits(self) -> list[OpenWait]:
        waits = []
        for rank, process in self._ranks.items():
            if process.alive and process.box.has_events:
                ring = process.box.ring
                waits += [
                    OpenWait(rank, event.site or event.kind, event.seq, event.t_ns)
                    for event in process.box.open_spans()
                    if event.group and "(" in ring.name(event.kind)
                ]
        return waits

    def _ask(self, process: RankProcess) -> _Asked:
        seen = sample(process.pid) if process.alive else Sample()
        asked = _Asked(process.box.stacks_size, seen, self._clock.now_ns())
        # without a handler the signal would end it: a program that has left the job, or never joined
        if process.has_said_hello and catches(seen, SIGUSR1):
            process.signal(SIGUSR1)
        return asked

    def _view(self, process: RankProcess) -> RankView:
        asked = self._asked.get(process.rank)
        ring = process.box.ring
        # a span that ends between the two looks is seen once, as ended
        events = {e._replace(dur_ns=0): e for e in process.box.open_spans()}
        events.update((e._replace(dur_ns=0), e) for e in ring.tail(HISTORY))
        view = RankView(
            process.rank,
            process.pid,
            tuple(_worded(event, ring) for event in sorted(events.values())),
            ended=clause(process.end) if process.end is not None else "",
        )
        if asked is None or not process.alive:
            return view
        elapsed_ns = self._clock.now_ns() - asked.now_ns
        return view._replace(
            process=process_between(asked.sample, sample(process.pid), elapsed_ns),
            stack=process.box.stacks(asked.stacks_from),
        )

    def _show(self, report: HangReport) -> None:
        text = str(report)
        self._last = report
        self.reports.append(text)
        self._notice(text.removeprefix("braid: "))
        (self._log_dir / f"hang-{len(self.reports)}.txt").write_text(text + "\n")

    def _resume(self, over: Resume) -> None:
        if self._last is None:
            return
        who = self._last.missing_ranks or self._last.waiting_ranks
        durations = [self._lasted_ns(wait) for wait in over.waits]
        self._notice(f"{rank_list(who)} went on after {max(durations) / 1e9:.1f} s")

    def _lasted_ns(self, wait: OpenWait) -> int:
        """From the record, which knows better than the look that found it closed."""
        events = self._ranks[wait.rank].box.ring.tail(HISTORY)
        ended = (e.dur_ns for e in events if e.t_ns == wait.t_ns and not e.open)
        return next(ended, self._clock.now_ns() - wait.t_ns)


def _worded(event: Event, ring: EventRing) -> SpanView:
    name, site = ring.name(event.kind), ring.name(event.site)
    return SpanView(name, event.t_ns, event.dur_ns, event.group, event.channel, event.seq, site)
