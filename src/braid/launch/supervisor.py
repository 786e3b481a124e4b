"""The launcher: starts the ranks of a run on this host, watches them, ends them together and says who is guilty.

Problem: whoever starts N processes must answer for all of them: see a death at once, tell the others why, collect what each
said, leave nothing behind, and never blame a victim. Shell loops and `mp.spawn` do a part of this; torchrun polls its
workers and restarts them before anybody has looked.

Idea: one thread, one selector. Signals, pipes, connections and deadlines become events of `SupervisorState`, and its
instructions are carried out here. Nothing in this file decides.
"""

from __future__ import annotations

import os
import secrets
import selectors
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from signal import SIGCHLD, SIGINT, SIGKILL, SIGUSR1

import psutil

from braid._version import __version__
from braid.clock import Clock, MonotonicClock
from braid.diagnose import (
    Ending,
    RankEnd,
    RunRecord,
    SavedCheckpoint,
    Verdict,
    clause,
    judge,
    signal_name,
)
from braid.errors import ConfigError
from braid.launch.black_box import BlackBox
from braid.launch.console import QuietConsole
from braid.launch.hang_watch import HangWatch
from braid.launch.job import JobSpec, Outcome, check_command, choose_threads, command_line
from braid.launch.memory import MemoryWatch
from braid.launch.output import Console, LineBudget, RankOutput
from braid.launch.port import PortReservation
from braid.launch.processes import SignalInbox, changes_of, end_descendants, subreaper
from braid.launch.rank_process import RankProcess
from braid.launch.record import make_log_dir, write_record
from braid.launch.supervisor_state import (
    Continued,
    Event,
    Exited,
    Instruction,
    Interrupted,
    Limits,
    Phase,
    SaidFailed,
    SendSignal,
    Started,
    Stopped,
    SupervisorState,
    Tell,
    Tick,
    Warn,
)
from braid.rendezvous import Failed, FromRank, Hello, JobEnvironment, Left, Saved
from braid.rendezvous.control import CONTROL_ROLE
from braid.store import STORE_LIMITS, STORE_ROLE, StoreServer
from braid.wire import Identity, Listener, Secret

__all__ = ["Supervisor"]

NOTICE_NS = (
    2_000_000  # a survivor may notice a death, and unwind, this long before the launcher does
)
TIMEOUT_EXIT_CODE = 124  # that of timeout(1)


class Supervisor:
    """Runs jobs on this host.

    Args:
        console: Where output and notices go; kept in memory when None.
        clock: Time source; the host's when None.
        owns_process: Set by a program that does nothing but launch: every descendant left at the end of a run is then
            ended, even one that hides its origin.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        clock: Clock | None = None,
        owns_process: bool = False,
    ) -> None:
        self._console = console or QuietConsole()
        self._clock = clock or MonotonicClock()
        self._owns_process = owns_process

    def run(self, job: JobSpec) -> Outcome:
        """Run a job to its end; signals of this process are forwarded to its ranks meanwhile.

        Args:
            job: What to run.

        Returns:
            What came of it; failures of ranks are outcomes, not exceptions.

        Raises:
            ConfigError: The job cannot be started; nothing is left running.
        """
        check_command(job)
        with ExitStack() as stack:
            known = frozenset(child.pid for child in psutil.Process().children())
            inbox = stack.enter_context(SignalInbox())
            stack.enter_context(subreaper())
            port = stack.enter_context(PortReservation(job.port)).port
            run = stack.enter_context(_Run(job, self._console, self._clock, inbox, port))
            try:
                run.attend()
            finally:
                end_descendants(
                    [process.pid for process in run.ranks.values()],
                    {"BRAID_RUN_ID": run.run_id},
                    all_new=self._owns_process,
                    known=known,
                )
            return run.conclude()


class _Run:
    """One run in progress; closing it ends all of its processes."""

    def __init__(
        self, job: JobSpec, console: Console, clock: Clock, inbox: SignalInbox, port: int
    ) -> None:
        self.run_id = secrets.token_hex(8)
        self.ranks: dict[int, RankProcess] = {}
        self._job = job
        self._console = console
        self._clock = clock
        self._inbox = inbox
        self._port = port
        self._start_ns = clock.now_ns()
        self._state = SupervisorState(job.num_ranks, _limits(job), self._start_ns)
        self._memory = MemoryWatch.of_this_process()
        self._saved: SavedCheckpoint | None = None
        self._announced = False
        self._threads, reason = choose_threads(job)
        self._argv = command_line(job)
        self._log_dir = make_log_dir(job)
        self._record = RunRecord(
            braid=__version__,
            run_id=self.run_id,
            command=job.command,
            command_kind=job.kind,
            num_ranks=job.num_ranks,
            started=datetime.now().astimezone().isoformat(timespec="seconds"),
            threads=f"{self._threads} ({reason})",
        )
        self._keep(partial(write_record, Path(self._log_dir), self._record))
        plural = "s" if job.num_ranks > 1 else ""
        self._console.notice(
            f"{job.num_ranks} rank{plural}, logs in {self._log_dir}, "
            f"OMP_NUM_THREADS={self._threads} ({reason})"
        )
        self._hangs = HangWatch(
            job.hang_report_s,
            self.ranks,
            clock=clock,
            log_dir=Path(self._log_dir),
            notice=console.notice,
        )
        with ExitStack() as stack:
            secret = Secret.generate()
            self._secret_fd = secret.to_fd()
            stack.callback(os.close, self._secret_fd)
            self._listener = stack.enter_context(
                Listener(
                    _store_address(job, self.run_id),
                    secret,
                    Identity(self.run_id, "launcher", -1),
                    limits=STORE_LIMITS,
                    clock=clock,
                )
            )
            self._store = stack.enter_context(StoreServer(clock=clock))
            self._selector = stack.enter_context(selectors.DefaultSelector())
            stack.callback(self._end_processes)
            self._selector.register(inbox, selectors.EVENT_READ, self._on_signals)
            self._selector.register(self._listener, selectors.EVENT_READ, self._on_clients)
            self._stack = stack.pop_all()

    def attend(self) -> None:
        """Start the ranks and stay until all of them have ended."""
        while self._state.phase is not Phase.DONE:
            if self._state.starting:
                self._start(len(self.ranks))
            for key, _ in self._selector.select(self._pause_s()):
                key.data()
            overdue_ns = self._listener.next_deadline_ns()
            if overdue_ns is not None and overdue_ns <= self._clock.now_ns():
                self._on_clients()
            if self._state.phase is Phase.RUNNING:
                self._keep(self._hangs.attend)
            self._handle(Tick())

    def conclude(self) -> Outcome:
        """Judge, and write what is worth keeping."""
        for process in self.ranks.values():
            process.drain()
        has_timeline = any(process.box.has_events for process in self.ranks.values())
        verdict = self._verdict()
        outcome = Outcome(
            exit_code=_exit_code(verdict, self._state.signum),
            verdict=verdict,
            elapsed_s=(self._clock.now_ns() - self._start_ns) / 1e9,
            log_dir=self._log_dir,
            step=max(
                (s for p in self.ranks.values() if (s := p.box.step) is not None), default=None
            ),
            saved=self._saved,
            resume=(self._job.resume_command or _resume_command(self._job)) if self._saved else "",
            limit_s=self._job.timeout_s,
            has_timeline=has_timeline,
        )
        for process in self.ranks.values():
            self._keep(partial(process.box.write_to, Path(self._log_dir)))
        record = replace(self._record, outcome=outcome, hangs=tuple(self._hangs.reports))
        self._keep(partial(write_record, Path(self._log_dir), record))
        return outcome

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    # Starting

    def _start(self, rank: int) -> None:
        log_path = Path(self._log_dir) / f"rank{rank}.log"
        budget = LineBudget() if self._job.num_ranks > 1 else None
        try:
            with ExitStack() as stack:
                box = stack.enter_context(BlackBox(rank))
                output = RankOutput(rank, log_path, self._console, budget)
                stack.callback(output.close, self._clock.now_ns())
                self.ranks[rank] = RankProcess(
                    rank,
                    self._argv,
                    environ=self._environ(rank, box),
                    pass_fds=[self._secret_fd],
                    box=box,
                    output=output,
                    selector=self._selector,
                    on_message=self._on_message,
                    clock=self._clock,
                )
                stack.pop_all()
        except OSError as exc:
            msg = (
                f"cannot start rank {rank} of {self._job.num_ranks}: {exc.strerror}; use fewer ranks, "
                "or raise the limits of files and processes (ulimit -n, ulimit -u)"
            )
            raise ConfigError(msg) from exc
        self._handle(Started(rank))

    def _environ(self, rank: int, box: BlackBox) -> dict[str, str]:
        size = self._job.num_ranks
        told = JobEnvironment(
            rank=rank,
            world_size=size,
            local_rank=rank,
            local_world_size=size,
            run_id=self.run_id,
            master_addr="127.0.0.1",
            master_port=self._port,
            store_address=self._listener.address,
            secret_fd=self._secret_fd,
            events_fd=box.events_fd,
            stacks_fd=box.stacks_fd,
            log_dir=self._log_dir,
            resume=self._job.resume,
            launched_by="braid",
        )
        # A run inside a run must not inherit what only the outer one was told.
        outer = ("BRAID_RESUME", "TORCHELASTIC_")
        inherited = {k: v for k, v in self._job.environ.items() if not k.startswith(outer)}
        return {
            **inherited,
            **told.to_environ(),
            "OMP_NUM_THREADS": self._threads,
            "PYTHONUNBUFFERED": "1",
            "BRAID_LAUNCHER_PID": str(os.getpid()),
        }

    # Events

    def _pause_s(self) -> float | None:
        if self._state.starting:
            return 0.0
        due = [self._state.deadline_ns, self._listener.next_deadline_ns()]
        if self._state.phase is Phase.RUNNING:
            due.append(self._hangs.deadline_ns)
        next_ns = min((ns for ns in due if ns is not None), default=None)
        return None if next_ns is None else max(0.0, (next_ns - self._clock.now_ns()) / 1e9)

    def _on_signals(self) -> None:
        for signum in self._inbox.take():
            if signum != SIGCHLD:
                first = self._state.phase is Phase.RUNNING
                then = "passing it on to all ranks" if first else "ending all ranks now"
                self._console.notice(f"{signal_name(signum)} received, {then}")
                self._handle(Interrupted(signum))
        for process in list(self.ranks.values()):
            if process.alive:
                self._look_at(process)

    def _look_at(self, process: RankProcess) -> None:
        for change in changes_of(process.pid):
            if change.what == "stopped":
                self._handle(Stopped(process.rank, change.status))
            elif change.what == "continued":
                self._handle(Continued(process.rank))
            else:
                self._on_clients()  # it may have connected, spoken and died since the last look
                process.hear()
                process.drain()
                end = process.ended(change, self._state.ranks[process.rank], self._memory)
                self._announce(end)
                self._handle(Exited(process.rank, clause(end), end.exit_code == 0))

    def _on_clients(self) -> None:
        for connection in self._listener.accept_ready():
            role, rank = connection.peer.role, connection.peer.rank
            process = self.ranks.get(rank)
            if role == STORE_ROLE:
                self._store.serve(connection)
            elif role == CONTROL_ROLE and process is not None:
                process.adopt(connection)
            else:
                connection.close()

    def _on_message(self, process: RankProcess, message: FromRank) -> None:
        if isinstance(message, Hello):
            process.has_said_hello = True
        elif isinstance(message, Left):
            process.has_said_hello = False  # it gives no stacks any more
        elif isinstance(message, Saved):
            self._note_saved(message)
        elif isinstance(message, Failed):
            process.said = message
            end = RankEnd(rank=process.rank, pid=process.pid, exit_code=1, error=process.error())
            self._announce(end)
            self._handle(SaidFailed(process.rank, clause(end)))

    def _note_saved(self, message: Saved) -> None:
        if self._saved is None or message.step >= self._saved.step:
            self._saved = SavedCheckpoint(message.step, message.path, message.sha256_ok)

    def _announce(self, end: RankEnd) -> None:
        """Say at once who failed first; the block comes when all have ended."""
        if end.ending is Ending.CAUSE and not self._announced:
            self._announced = True
            inside = self.ranks[end.rank].box.testimony()
            if inside:
                inside = f" ({inside})" if end.error is not None else f" {inside}"
            self._console.notice(f"rank {end.rank} (pid {end.pid}) {clause(end)}{inside}")

    # Instructions

    def _handle(self, event: Event) -> None:
        for instruction in self._state.handle(event, self._clock.now_ns()):
            self._obey(instruction)

    def _obey(self, instruction: Instruction) -> None:
        if isinstance(instruction, SendSignal):
            for rank in instruction.ranks:
                if instruction.signum == SIGINT:
                    self.ranks[rank].output.hide_interrupts()
                self.ranks[rank].signal(instruction.signum)
        elif isinstance(instruction, Tell):
            for process in self.ranks.values():
                process.tell(instruction.message)
        elif isinstance(instruction, Warn):
            self._warn(self.ranks[instruction.rank], instruction.signum)
        else:
            for process in self.ranks.values():
                if process.has_said_hello:
                    process.signal(SIGUSR1)

    def _warn(self, process: RankProcess, signum: int) -> None:
        who = f"rank {process.rank} (pid {process.pid})"
        if not signum:
            self._console.notice(f"{who} goes on")
            return
        inside = process.box.testimony()
        self._console.notice(
            f"{who} was stopped by {signal_name(signum)}{' ' + inside if inside else ''}; it is given "
            f"up after {self._job.stopped_limit_s:g} s, `kill -CONT {process.pid}` lets it go on"
        )

    # The end

    def _verdict(self) -> Verdict:
        ends = [process.end for process in self.ranks.values() if process.end is not None]
        verdict = judge(ends, stopped_by=self._state.stopped_by)
        fault_ns = self._state.fault_ns
        at_ns = None if fault_ns is None else fault_ns - NOTICE_NS
        return replace(
            verdict,
            guilty=tuple(self._testify(end, None) for end in verdict.guilty),
            others=tuple(self._testify(end, at_ns) for end in verdict.others),
        )

    def _testify(self, end: RankEnd, at_ns: int | None) -> RankEnd:
        if end.ending is Ending.FINISHED and at_ns is not None:
            return end
        gave_up = at_ns is not None and end.ending is Ending.SYMPTOM
        box = self.ranks[end.rank].box
        return replace(end, testimony=box.testimony(at_ns, gave_up=gave_up))

    def _keep(self, write: Callable[[], None]) -> None:
        """A full disk costs records, not the run."""
        try:
            write()
        except OSError as exc:
            self._console.notice(f"cannot write to {self._log_dir}: {exc.strerror}")

    def _end_processes(self) -> None:
        """Whatever went wrong, leave no process."""
        for process in self.ranks.values():
            process.signal(SIGKILL)
            if process.alive:
                with suppress(ChildProcessError):
                    process.wait()
            process.close()


def _limits(job: JobSpec) -> Limits:
    return Limits(
        grace_ns=round(job.grace_s * 1e9),
        stopped_ns=round(job.stopped_limit_s * 1e9),
        interrupt_ns=round(job.interrupt_limit_s * 1e9),
        timeout_ns=None if job.timeout_s is None else round(job.timeout_s * 1e9),
    )


def _store_address(job: JobSpec, run_id: str) -> str:
    if sys.platform != "linux" or job.environ.get("BRAID_PORTABLE") == "1":
        return "tcp://127.0.0.1:0"
    return f"unix:@braid-{run_id}"


def _exit_code(verdict: Verdict, signum: int) -> int:
    if verdict.kind == "timeout":
        return TIMEOUT_EXIT_CODE
    if verdict.kind == "interrupted":
        return 128 + signum
    if not verdict.guilty:
        return 0
    guilty = verdict.guilty[0]
    if verdict.kind == "exception":  # also one that ended in an abort during the teardown
        return guilty.exit_code or 1
    return 128 + guilty.signal if guilty.signal else guilty.exit_code or 1


def _resume_command(job: JobSpec) -> str:
    flag = {"script": [], "module": ["-m"], "program": ["--no-python"]}[job.kind]
    told = ["braid", "run", "--resume", "auto", "-n", str(job.num_ranks), *flag, *job.command]
    return shlex.join(told)
