"""Monitors a run for hangs and reports which ranks wait for which.

The launcher reads everything from outside: the event rings in its own memory, /proc, and stacks.
A signal handler in the rank dumps its stack into a descriptor of the launcher, even while the rank
holds the interpreter's lock. The stack dump, once per report, is a rank's only cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from braid.launch.process.hang_state import (
    AskStacks,
    HangState,
    Instruction,
    Look,
    OpenWait,
    ReportHang,
    Resume,
)
from braid.launch.supervise.rank import Rank
from braid.runtime.clock import Clock
from braid.runtime.diagnose.block import rank_list
from braid.runtime.diagnose.hang import HangReport, find_hang
from braid.runtime.diagnose.hang_view import RankView

__all__ = ["HangMonitor", "MemberChanges"]


class MemberChanges:
    """Changes of the members of a run, as far as reports of hangs need them.

    Attributes:
        successors: Rank that has the role of each lost rank, for ranks with roles.
        epoch_ns: Time at which the present epoch of an elastic run began; 0 without epochs.
    """

    def __init__(self) -> None:
        self.successors: dict[int, int] = {}
        self.epoch_ns = 0


class HangMonitor:
    """Executes the instructions of `HangState`: looks for waits, requests stacks, makes reports.

    Args:
        limit_s: Longest wait of a rank, in seconds, that is not reported; 0 turns reports off.
        ranks: Ranks that have been started, by number; may grow.
        changes: Changes of the members.
        clock: Clock of the ranks' events.
        log_dir: Directory for the reports, `hang-<n>.txt`.
        notice: Shows a text to the user.
        keep: Calls a function that writes a file; an error of the file does not end the run.
        hosts: Returns the names of the hosts by address; further hosts may come.

    Attributes:
        reports: Texts of all reports so far.
        links: Texts from the last report about pairs of hosts that cannot communicate.
    """

    def __init__(
        self,
        limit_s: float,
        ranks: Mapping[int, Rank],
        changes: MemberChanges,
        *,
        clock: Clock,
        log_dir: Path,
        notice: Callable[[str], None],
        keep: Callable[[Callable[[], object]], None],
        hosts: Callable[[], Mapping[str, str]],
    ) -> None:
        self.reports: list[str] = []
        self.links: tuple[str, ...] = ()
        self._hosts = hosts
        self._limit_ns = round(limit_s * 1e9)
        self._ranks = ranks
        self._changes = changes
        self._clock = clock
        self._log_dir = log_dir
        self._notice = notice
        self._keep = keep
        self._state = HangState(self._limit_ns, clock.now_ns())
        self._last: HangReport | None = None

    @property
    def deadline_ns(self) -> int | None:
        """Time at which `poll` is due; None when reports are off."""
        return self._state.deadline_ns

    def poll(self) -> None:
        """Take the steps that are due, without blocking.

        Raises:
            OSError: A report has been shown but cannot be written to its file.
        """
        now_ns = self._clock.now_ns()
        answered = all(rank.has_answered for rank in self._ranks.values())
        for instruction in self._state.tick(now_ns, answered=answered):
            self._execute(instruction, now_ns)

    def all_ended_well(self) -> None:
        """Notify the user that reported waits are over; called when all ranks have ended well."""
        for instruction in self._state.all_ended_well():
            self._execute(instruction, self._clock.now_ns())

    def _execute(self, instruction: Instruction, now_ns: int) -> None:
        if isinstance(instruction, Look):
            for answer in self._state.looked(self._waits(), now_ns):
                self._execute(answer, now_ns)
        elif isinstance(instruction, AskStacks):
            for rank in self._ranks.values():
                rank.request_stack()
        elif isinstance(instruction, Resume):
            self._resume(instruction)
        elif isinstance(instruction, ReportHang):
            report = find_hang(
                list(self._views()),
                now_ns=now_ns,
                limit_ns=self._limit_ns,
                hosts=self._hosts(),
            )
            self._state.reported(report.waiting_ranks if report else (), now_ns)
            if report is not None:
                self._show(report)

    def _views(self) -> Iterator[RankView]:
        """Yield the views of the ranks of this epoch.

        Others know a successor by the number of the lost rank. Operations of an earlier epoch are
        left out: its groups are gone, also where a loss has left an operation open.
        """
        for number, rank in self._ranks.items():
            successor = self._changes.successors.get(number)
            view = rank.view() if successor is None else self._ranks[successor].view()
            begin_ns = self._changes.epoch_ns
            spans = tuple(s for s in view.spans if s.t_ns >= begin_ns or not s.group)
            if rank.alive or not begin_ns or any(span.t_ns >= begin_ns for span in spans):
                yield view._replace(rank=number, spans=spans)

    def _waits(self) -> list[OpenWait]:
        waits = [wait for rank in self._ranks.values() if rank.alive for wait in rank.waits()]
        return [wait for wait in waits if wait.t_ns >= self._changes.epoch_ns]

    def _show(self, report: HangReport) -> None:
        text = str(report)
        self._last = report
        self.links = tuple(cause.text for cause in report.causes if cause.kind == "link")
        self.reports.append(text)
        self._notice(text.removeprefix("braid: "))
        path = self._log_dir / f"hang-{len(self.reports)}.txt"
        self._keep(lambda: path.write_text(text + "\n"))

    def _resume(self, over: Resume) -> None:
        self.links = ()
        if self._last is None:
            return
        ranks = self._last.missing_ranks or self._last.waiting_ranks
        durations = [self._lasted_ns(wait) for wait in over.waits]
        self._notice(f"{rank_list(ranks)} went on after {max(durations) / 1e9:.1f} s")

    def _lasted_ns(self, wait: OpenWait) -> int:
        """Return the duration from the rank's record, else the time until now."""
        lasted_ns = self._ranks[wait.rank].lasted_ns(wait)
        return self._clock.now_ns() - wait.t_ns if lasted_ns is None else lasted_ns
