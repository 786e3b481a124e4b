"""Keeps the journal of a run: notices, logs of events and metrics, the record and the outcome.

A file that cannot be written ends no run: the user is told the reason once.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from braid._version import __version__
from braid.launch.process.job import JobSpec, Outcome
from braid.launch.process.output import Console
from braid.launch.process.traceback_filter import SharedTracebacks
from braid.launch.supervise.backend import RankBackend
from braid.launch.supervise.hang_monitor import HangMonitor
from braid.launch.supervise.rank import Rank
from braid.launch.supervise.run_record import (
    git_commit,
    make_log_dir,
    package_versions,
    write_record,
)
from braid.launch.supervise.supervisor_state import RankFacts, SupervisorState, Warn
from braid.runtime.clock import Clock
from braid.runtime.closing import Closing
from braid.runtime.diagnose.block import SavedCheckpoint, rank_list
from braid.runtime.diagnose.run_events import EVENTS_FILE, RunEvent
from braid.runtime.diagnose.run_record import RunRecord
from braid.runtime.diagnose.verdict import (
    Ending,
    RankEnd,
    Verdict,
    clause,
    exit_code,
    judge,
    signal_name,
)
from braid.runtime.metrics import MetricsFiles
from braid.runtime.rendezvous import Loaded, Logged, Saved

__all__ = ["EventLog", "RunJournal"]

NOTICE_NS = 2_000_000  # a surviving rank may notice a death this long before the launcher does


class EventLog(Closing):
    """Appends events to a file of the run's directory, on which it holds a shared lock.

    The kernel releases the lock however the launcher ends, so readers know whether more can come.
    Lines that a full disk refuses are kept, and written with the next one.

    Args:
        run_directory: Directory of the run. The file is made with its first line.
    """

    def __init__(self, run_directory: Path) -> None:
        self._path = run_directory / EVENTS_FILE
        self._file: BinaryIO | None = None
        self._unwritten = b""

    def append(self, kind: Any, **values: Any) -> None:
        """Append an event with the current time.

        Args:
            kind: Kind of the event; see `RunEvent`.
            values: Other fields of `RunEvent`.

        Raises:
            OSError: The file cannot be written.
        """
        event = RunEvent(round(time.time(), 4), kind, **values)
        self._unwritten += msgspec.json.encode(event) + b"\n"
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            with suppress(OSError):  # file systems without locks
                fcntl.flock(self._file, fcntl.LOCK_SH)
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) or 0 :]

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()


class RunJournal(AbstractContextManager["RunJournal"]):
    """Shows a run to its user and writes the files of its directory.

    Args:
        job: The job.
        console: Console for output and notices.
        clock: Time source.
        backend: Backend that starts the ranks.
        ranks: Ranks that have been started, by number; may grow.

    Attributes:
        log_dir: Directory of the run, as the user would write it.
        tracebacks: Tracebacks that several ranks print.

    Raises:
        ConfigError: The directory cannot be created.
    """

    def __init__(
        self,
        job: JobSpec,
        console: Console,
        clock: Clock,
        backend: RankBackend,
        ranks: Mapping[int, Rank],
    ) -> None:
        self.log_dir = make_log_dir(job)
        self.tracebacks = SharedTracebacks()
        self._job = job
        self._console = console
        self._clock = clock
        self._ranks = ranks
        self._start_ns = clock.now_ns()
        self._saved: SavedCheckpoint | None = None
        self._resume = "auto"  # value of --resume that loads it
        self._announced = False
        self._unwritten: set[str] = set()
        self._record = RunRecord(
            braid=__version__,
            run_id=backend.run_id,
            command=job.command,
            command_kind=job.kind,
            num_ranks=job.num_ranks,
            started=datetime.now().astimezone().isoformat(timespec="seconds"),
            threads=backend.threads,
            hosts=backend.hosts,
            title=job.title,
            git=git_commit(),
        )
        with ExitStack() as stack:
            self._metrics = stack.enter_context(MetricsFiles(Path(self.log_dir), clock))
            self._events = stack.enter_context(EventLog(Path(self.log_dir)))
            self.keep(partial(write_record, Path(self.log_dir), self._record))
            plural = "s" if job.num_ranks > 1 else ""
            listed = ",".join(f"{host.name}:{host.num_ranks}" for host in backend.hosts)
            where = f" on {listed}" if backend.spans_hosts else ""
            self.notice(
                f"{job.num_ranks} rank{plural}{where}, logs in {self.log_dir}, "
                f"OMP_NUM_THREADS={backend.threads}"
            )
            self._files = stack.pop_all()

    def notice(self, text: str) -> None:
        """Show a text to the user."""
        self._console.notice(text)

    def note(self, kind: str, **values: object) -> None:
        """Append an event of `kind` to the launcher's log of the run.

        `values` are the other fields of `RunEvent`.
        """
        self.keep(partial(self._events.append, kind, **values))

    def note_end(self, end: RankEnd, facts: RankFacts) -> None:
        """Append the end of a rank to the launcher's log of the run."""
        kind = "failed" if end.ending in {Ending.CAUSE, Ending.DOUBTFUL} else "ended"
        if end.exit_code == 0:
            kind = "finished"
        elif facts.survived:
            kind = "lost"
        self.note(kind, rank=end.rank, text=clause(end))

    def keep(self, write: Callable[[], object]) -> None:
        """Call `write`; if it fails, notify the user once for each reason and go on."""
        try:
            write()
        except OSError as exc:
            text = f"cannot write to {self.log_dir}: {exc.strerror}; choose another --log-dir"
            if text not in self._unwritten:
                self._unwritten.add(text)
                self.notice(text)
                self.note("notice", text=text)

    def log(self, rank: int, message: Logged) -> None:
        """Append a row to the metrics of a rank."""
        self.keep(partial(self._metrics.append, rank, message.row))

    def note_checkpoint(self, message: Saved | Loaded) -> None:
        """Record the last checkpoint that the run saved, else the checkpoint that it began with."""
        saved = self._saved
        if isinstance(message, Saved):
            if saved is None or saved.is_earlier or message.step >= saved.step:
                self._resume = "auto"
                self._saved = SavedCheckpoint(message.step, message.path, message.sha256_ok)
        elif saved is None:
            self._saved = SavedCheckpoint(message.step, message.path, True, is_earlier=True)
            self._resume = message.resume

    def announce(self, end: RankEnd) -> None:
        """Notify the user immediately of the first rank that failed; ignore later failures.

        The error block with the details appears at the end of the run.
        """
        if end.ending is Ending.CAUSE and not self._announced:
            self._announced = True
            inside = self._ranks[end.rank].last_events()
            if inside:
                inside = f" ({inside})" if end.error is not None else f" {inside}"
            self.notice(f"{self._ranks[end.rank].name} {clause(end)}{inside}")

    def warn(self, process: Rank, warning: Warn) -> None:
        """Notify the user of a stopped or resumed rank, or of a lost rank if the run goes on."""
        signum = warning.signum
        if not signum:
            is_last = not any(other.alive for other in self._ranks.values() if other is not process)
            follows = "others follow, with the last checkpoint" * is_last
            ended = f"{warning.reason}; {follows or 'the others go on without it'}"
            self.notice(f"{process.name} {ended if warning.reason else 'goes on'}")
            return
        inside = process.last_events()
        stopped = f"{process.name} was stopped by {signal_name(signum)}{' ' * bool(inside)}{inside}"
        self.notice(
            f"{stopped}; it is killed after {round(warning.limit_s, 1):g} s unless "
            f"`kill -CONT {process.pid}` lets it go on"
        )

    def conclude(self, state: SupervisorState, hangs: HangMonitor) -> Outcome:
        """Return the outcome of the run, and write its record, events and stacks."""
        boxes = [process.box for process in self._ranks.values()]
        has_timeline = any(box.has_events for box in boxes)
        verdict = self._verdict(state)
        outcome = Outcome(
            exit_code=exit_code(verdict, state.signum),
            verdict=verdict,
            elapsed_s=(self._clock.now_ns() - self._start_ns) / 1e9,
            log_dir=self.log_dir,
            step=max((box.step for box in boxes if box.step is not None), default=None),
            saved=self._saved,
            resume=self._job.resume_line(self._resume) if self._saved else "",
            limit_s=self._job.timeout_s,
            has_timeline=has_timeline,
            links=() if verdict.certain else hangs.links,
        )
        if outcome.ok:
            hangs.all_ended_well()
        for box in boxes:
            self.keep(partial(box.write_to, Path(self.log_dir)))
        record = replace(
            self._record, outcome=outcome, hangs=tuple(hangs.reports), packages=package_versions()
        )
        self.keep(partial(write_record, Path(self.log_dir), record))
        return outcome

    def __exit__(self, *exc_info: object) -> None:
        self._files.close()
        for (rank, same), errors in self.tracebacks.hidden().items():
            self.notice(f"{rank_list(same)} printed the same as rank {rank}: {'; '.join(errors)}")
        omitted = sum(process.output.num_omitted for process in self._ranks.values())
        if omitted:
            self.notice(
                f"{omitted:,} lines not shown in all: the logs in {self.log_dir} have every line"
            )

    def _verdict(self, state: SupervisorState) -> Verdict:
        ends = [process.end for process in self._ranks.values() if process.end is not None]
        verdict = judge(ends, stopped_by=state.stopped_by)
        at_ns = None if state.fault_ns is None else state.fault_ns - NOTICE_NS
        return replace(
            verdict,
            cause=tuple(self._with_last_events(end, None) for end in verdict.cause),
            affected=tuple(self._with_last_events(end, at_ns) for end in verdict.affected),
            survived=tuple(self._with_last_events(end, None) for end in verdict.survived),
        )

    def _with_last_events(self, end: RankEnd, at_ns: int | None) -> RankEnd:
        if end.ending is Ending.FINISHED and at_ns is not None:
            return end
        gave_up = at_ns is not None and end.ending is Ending.SYMPTOM
        text = self._ranks[end.rank].last_events(at_ns, gave_up=gave_up)
        return replace(end, last_events=text)
