"""Watches a run for ranks that stand still, and reports who they wait for.

Everything is read from outside: event rings in memory of the launcher's, /proc, and stacks that a
signal handler of the rank's dumps into a descriptor of the launcher's, which works while the rank
holds the interpreter's lock. A rank pays for its stack, once per report, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from braid.clock import Clock
from braid.diagnose import HangReport, find_hang, rank_list
from braid.launch.process.hang_state import (
    AskStacks,
    HangState,
    Instruction,
    Look,
    OpenWait,
    Report,
    Resume,
)
from braid.launch.supervise.rank import Rank

__all__ = ["HangWatch"]


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
        ranks: Mapping[int, Rank],
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
        self._last: HangReport | None = None

    @property
    def deadline_ns(self) -> int | None:
        """When `poll` is due; None when reports are off."""
        return self._state.deadline_ns

    def poll(self) -> None:
        """Do what is due.

        Raises:
            OSError: A report cannot be written; it has been shown.
        """
        now_ns = self._clock.now_ns()
        answered = all(rank.has_answered for rank in self._ranks.values())
        for instruction in self._state.tick(now_ns, answered=answered):
            self._obey(instruction, now_ns)

    def all_ended_well(self) -> None:
        """Whoever was reported went on, even if the run ended before the next look."""
        for instruction in self._state.all_ended_well():
            self._obey(instruction, self._clock.now_ns())

    def _obey(self, instruction: Instruction, now_ns: int) -> None:
        if isinstance(instruction, Look):
            for answer in self._state.looked(self._waits(), now_ns):
                self._obey(answer, now_ns)
        elif isinstance(instruction, AskStacks):
            for rank in self._ranks.values():
                rank.ask()
        elif isinstance(instruction, Resume):
            self._resume(instruction)
        elif isinstance(instruction, Report):
            report = find_hang(
                [rank.view() for rank in self._ranks.values()],
                now_ns=now_ns,
                limit_ns=self._limit_ns,
            )
            self._state.reported(report.waiting_ranks if report else (), now_ns)
            if report is not None:
                self._show(report)

    def _waits(self) -> list[OpenWait]:
        return [wait for rank in self._ranks.values() if rank.alive for wait in rank.waits()]

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
        lasted_ns = self._ranks[wait.rank].lasted_ns(wait)
        return self._clock.now_ns() - wait.t_ns if lasted_ns is None else lasted_ns
