"""Runs a job: translates what happens to its ranks into events and executes the instructions.

One thread polls one selector; signals, pipes, connections and deadlines wake it. `SupervisorState`
takes all decisions, and the backend knows on which hosts the ranks are.
"""

from __future__ import annotations

import selectors
from collections import Counter
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from signal import SIGCHLD, SIGINT, SIGKILL, SIGTERM, SIGUSR1

from braid.errors import ConfigError
from braid.launch.process.black_box import BlackBox
from braid.launch.process.job import JobSpec, Outcome
from braid.launch.process.output import Console, LineBudget, RankOutput
from braid.launch.process.processes import Change, SignalInbox
from braid.launch.supervise.backend import RankBackend, RankSpec
from braid.launch.supervise.hang_monitor import HangMonitor, MemberChanges
from braid.launch.supervise.journal import RunJournal
from braid.launch.supervise.member_driver import MemberDriver
from braid.launch.supervise.rank import Rank
from braid.launch.supervise.slots import SlotSource
from braid.launch.supervise.supervisor_state import (
    Continued,
    Dismissed,
    Event,
    Exited,
    Instruction,
    Interrupted,
    ReportedFailure,
    RunPhase,
    SendSignal,
    SendToRank,
    Started,
    Stopped,
    SupervisorState,
    Tick,
    TimeLimits,
    Warn,
)
from braid.runtime.clock import Clock
from braid.runtime.diagnose.verdict import (
    RankEnd,
    clause,
    signal_name,
)
from braid.runtime.rendezvous import (
    Exiting,
    FromRank,
    JobEnvironment,
    Left,
    Loaded,
    Logged,
    RankFailed,
    RankHello,
    Ready,
    Resumable,
    Saved,
)
from braid.runtime.rendezvous.control import CONTROL_ROLE
from braid.runtime.store import STORE_LIMITS, STORE_ROLE, StoreServer
from braid.runtime.wire import Identity, Listener

__all__ = ["carry_out"]


def carry_out(
    job: JobSpec,
    console: Console,
    clock: Clock,
    inbox: SignalInbox,
    backend: RankBackend,
    slots: SlotSource | None = None,
) -> Outcome:
    """Run a job to its end.

    Args:
        job: Job to run.
        console: Console for output and notices.
        clock: Time source.
        inbox: Signals of this process.
        backend: Backend that starts the ranks; the caller closes it.
        slots: Source of the number of ranks of an elastic run; None if the number is fixed.

    Raises:
        ConfigError: A rank cannot be started; no process is left running.
    """
    with _Run(job, console, clock, inbox, backend, slots) as run:
        try:
            run.poll()
        finally:
            run.finish()
        outcome = run.conclude()
    backend.dismiss(outcome.exit_code, "" if outcome.ok else str(outcome))
    return outcome


class _Run(AbstractContextManager["_Run"]):
    """One run in progress; closing it ends all of its processes."""

    def __init__(
        self,
        job: JobSpec,
        console: Console,
        clock: Clock,
        inbox: SignalInbox,
        backend: RankBackend,
        slots: SlotSource | None,
    ) -> None:
        self.ranks: dict[int, Rank] = {}
        self._job = job
        self._signals: Counter[str] = Counter()  # by host
        self._num_signals = 0
        self._console = console
        self._clock = clock
        self._inbox = inbox
        self._backend = backend
        elastic = job.elastic
        self._members = MemberDriver(job, elastic, self, clock, slots) if elastic else None
        self.journal = RunJournal(job, console, clock, backend, self.ranks)
        self._state = SupervisorState(
            job.num_ranks + (elastic.spares if elastic else 0),
            TimeLimits.of(job),
            clock.now_ns(),
            job.expendable,
            job.needed,
            self._members.state if self._members is not None else None,
        )
        self._hangs = HangMonitor(
            job.hang_report_s if job.stdin_rank is None else 0.0,
            self.ranks,
            MemberChanges() if self._members is None else self._members.changes,
            clock=clock,
            log_dir=Path(self.journal.log_dir),
            notice=console.notice,
            keep=self.journal.keep,
            hosts=lambda: {host.address: host.name for host in backend.hosts},
        )
        with ExitStack() as stack:
            stack.enter_context(self.journal)
            self._listener = stack.enter_context(
                Listener(
                    backend.store_address,
                    backend.secret,
                    Identity(backend.run_id, "launcher", -1),
                    listen_anywhere=backend.spans_hosts,
                    limits=STORE_LIMITS,
                    clock=clock,
                )
            )
            self._store = stack.enter_context(StoreServer(clock=clock))
            self._selector = stack.enter_context(selectors.DefaultSelector())
            stack.callback(self._end_ranks)
            self._selector.register(inbox, selectors.EVENT_READ, self._on_signals)
            self._selector.register(self._listener, selectors.EVENT_READ, self._on_clients)
            backend.attach(
                self._selector,
                on_change=self._on_change,
                on_signal=self._on_signal,
                notice=console.notice,
            )
            stack.callback(backend.detach)
            self._stack = stack.pop_all()

    def poll(self) -> None:
        """Start the ranks and return when all of them have ended."""
        while self._state.phase is not RunPhase.DONE:
            if self._state.starting:
                self._start(len(self.ranks))
            for key, _ in self._selector.select(self._pause_s()):
                key.data()
            overdue_ns = self._listener.next_deadline_ns()
            if overdue_ns is not None and overdue_ns <= self._clock.now_ns():
                self._on_clients()
            self._backend.poll()
            if self._state.phase is RunPhase.RUNNING:
                self.journal.keep(self._hangs.poll)
                if self._members is not None:
                    self._members.poll()
            self._handle(Tick())

    def finish(self) -> None:
        """End the processes that ranks have left behind, on every host, through the backend."""
        overdue = self._backend.finish()
        while (next_ns := next(overdue, None)) is not None:
            for key, _ in self._selector.select(max(0.0, (next_ns - self._clock.now_ns()) / 1e9)):
                key.data()

    def conclude(self) -> Outcome:
        """Return the outcome of the run, and write its record, events and stacks."""
        for process in self.ranks.values():
            process.drain()
        return self.journal.conclude(self._state, self._hangs)

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    # Starting

    def _start(self, rank: int) -> None:
        log_path = Path(self.journal.log_dir) / f"rank{rank}.log"
        budget = LineBudget() if self._job.num_ranks > 1 else None
        try:
            with ExitStack() as stack:
                box = stack.enter_context(BlackBox(rank))
                tracebacks = self.journal.tracebacks if budget is not None else None
                output = RankOutput(rank, log_path, self._console, budget, tracebacks)
                stack.callback(output.close, self._clock.now_ns())
                spec = RankSpec(
                    self._environment(rank),
                    box,
                    output,
                    self._selector,
                    self._on_message,
                    self._clock,
                )
                self.ranks[rank] = self._backend.start(spec)
                stack.pop_all()
        except OSError as exc:
            msg = (
                f"cannot start rank {rank} of {self._job.num_ranks}: {exc.strerror}; use fewer "
                "ranks, or raise the limits of files and processes (ulimit -n, ulimit -u)"
            )
            raise ConfigError(msg) from exc
        process = self.ranks[rank]
        restarts_left = self._members.state.restarts_left if self._members is not None else -1
        self.journal.note(
            "started",
            rank=rank,
            pid=process.pid,
            host=process.host,
            restarts_left=restarts_left,
            has_role=bool(self._job.expendable),
            replaces=spec.environment.replaces,
        )
        self._handle(Started(rank, spec.environment.replaces))
        if self._members is not None:
            self._members.started(rank)

    def _environment(self, rank: int) -> JobEnvironment:
        """Return the settings of a rank, without the descriptors that only its parent knows."""
        members = self._members
        place, elastic = (rank, "") if members is None else members.take_place(rank)
        host = "" if members is None else members.host_of(rank)
        replaces = place if self._job.expendable and place != rank else -1
        num_ranks = self._job.num_ranks
        placement = self._backend.placement(place, host)
        num_known = max(num_ranks, rank + 1, placement.local_world_size)
        return JobEnvironment(
            rank=rank,
            world_size=num_ranks if replaces >= 0 else num_known,
            elastic=elastic,
            replaces=replaces,
            run_id=self._backend.run_id,
            store_address=self._backend.address_for_rank(self._listener.address),
            log_dir=self.journal.log_dir,
            resume=self._job.resume if members is None else members.resume,
            launched_by="braid",
            **placement._asdict(),
        )

    # Events

    def _pause_s(self) -> float | None:
        if self._state.starting:
            return 0.0
        due = [
            self._state.deadline_ns,
            self._listener.next_deadline_ns(),
            self._backend.deadline_ns,
        ]
        if self._state.phase is RunPhase.RUNNING:
            due.append(self._hangs.deadline_ns)
            due.append(self._members.deadline_ns if self._members is not None else None)
        next_ns = min((ns for ns in due if ns is not None), default=None)
        return None if next_ns is None else max(0.0, (next_ns - self._clock.now_ns()) / 1e9)

    def _on_signals(self) -> None:
        for signum in self._inbox.drain():
            if signum != SIGCHLD:
                self._on_signal(signum, "")
        self._backend.reap()

    def _on_signal(self, signum: int, host: str) -> None:
        """End the run after a signal on this host or on `host`."""
        if self._members is not None and host and signum == SIGTERM:
            self.journal.notice(f"SIGTERM received on host {host}: its ranks leave the run")
            for rank in self.ranks.values():
                if rank.host == host:
                    self._members.leaving.add(rank.rank)
                    rank.signal(SIGTERM)
            return
        if host:
            self._signals[host] += 1
            if self._signals[host] <= self._num_signals:
                return  # engines signal all hosts together
            self._num_signals += 1
        first = self._state.phase is RunPhase.RUNNING
        if signum == SIGTERM and self._state.signum == SIGTERM and self._backend.is_on_engine:
            return  # the engine repeats it while ranks save
        then = "passing it on to all ranks" if first else "ending all ranks now"
        where = f" on host {host}" if host else ""
        self.journal.notice(f"{signal_name(signum)} received{where}, {then}")
        self._handle(Interrupted(signum))

    def _on_change(self, process: Rank, change: Change) -> None:
        if change.kind == "stopped":
            text = f"was stopped by {signal_name(change.status)}"
            self.journal.note("stopped", rank=process.rank, text=text)
            self._handle(Stopped(process.rank, change.status))
        elif change.kind == "continued":
            self.journal.note("continued", rank=process.rank)
            self._handle(Continued(process.rank))
        else:
            self._on_clients()  # the rank may have connected and died since the last poll
            process.on_message()
            process.drain()
            facts = self._state.ranks[process.rank]
            by_us = facts.signalled or change.memory_kill is not None
            if change[:2] == ("killed", SIGKILL) and not by_us:
                change = change._replace(memory_kill=self._backend.memory_kill())
            end = process.ended(change, facts)
            self._handle(Exited(process.rank, clause(end), end.exit_code == 0))
            self.journal.note_end(end, facts)
            if facts.survived:
                process.end = replace(end, survived=True)
            else:
                self.journal.announce(end)
            if self._members is not None:
                self._members.ended(
                    process.rank,
                    has_finished=end.exit_code == 0,
                    was_dismissed=facts.dismissed,
                )

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

    def _on_message(self, process: Rank, message: FromRank) -> None:
        if isinstance(message, RankHello):
            process.has_joined = True
            if process.host:  # an agent has started it, and the launcher did not know its number
                self.journal.note("connected", rank=process.rank, pid=process.pid)
        elif isinstance(message, Left):
            process.has_joined = False  # the rank no longer dumps its stack
            process.missed = message.missed
            if not self._state.ranks[process.rank].signalled:
                process.left_ns = self._clock.now_ns()
        elif isinstance(message, Saved | Loaded):
            self.journal.note_checkpoint(message)
        elif isinstance(message, Ready | Resumable) and self._members is not None:
            self._members.received(process, message)
        elif isinstance(message, Logged):
            self.journal.log(process.rank, message)
            if self._members is not None and "members" in message.row:  # see `log_step`
                self._members.state.trained(process.rank)
        elif isinstance(message, RankFailed):
            process.failure = message
            self._on_failure(process, exit_code=1)
        elif isinstance(message, Exiting):
            process.exiting = message
            self._backend.reap()  # a rank that died before this one exited is the first to fail
            self._on_failure(process, exit_code=message.code)

    def _on_failure(self, process: Rank, *, exit_code: int) -> None:
        """React to the report of a rank that it is about to end."""
        if not process.alive:
            return
        end = RankEnd(
            rank=process.rank,
            pid=process.pid,
            host=process.host,
            exit_code=exit_code,
            error=process.error(),
            handled=process.exiting is not None,
        )
        is_removed = end.error is not None and end.error.type == "StaleError"
        if is_removed and self._state.is_expendable(process.rank):
            return  # the others go on without it: as if a signal ended it
        self.journal.announce(end)
        self._handle(ReportedFailure(process.rank, clause(end)))

    # Instructions

    def _handle(self, event: Event) -> None:
        for instruction in self._state.handle(event, self._clock.now_ns()):
            self._execute(instruction)

    def _execute(self, instruction: Instruction) -> None:
        if isinstance(instruction, SendSignal):
            for rank in instruction.ranks:
                if instruction.signum == SIGINT:
                    self.ranks[rank].output.hide_interrupts()
                self.ranks[rank].signal(instruction.signum)
        elif isinstance(instruction, SendToRank):
            for process in self.ranks.values():
                process.send(instruction.message)
        elif isinstance(instruction, Warn):
            self.journal.warn(self.ranks[instruction.rank], instruction)
        else:
            for process in self.ranks.values():
                if process.has_joined:
                    process.signal(SIGUSR1)

    # For the members of a run whose ranks are replaced

    @property
    def is_running(self) -> bool:
        """Whether nothing has ended the run so far."""
        return self._state.phase is RunPhase.RUNNING

    def start_another(self) -> None:
        """Start one more rank."""
        self._state.start_another()

    def dismiss(self, rank: int) -> None:
        """End a rank that the run no longer needs."""
        self._handle(Dismissed(rank))

    def interrupt(self) -> None:
        """End the run as after SIGTERM."""
        self._handle(Interrupted(SIGTERM))

    def _end_ranks(self) -> None:
        """Kill all ranks that still live, and release their resources."""
        for process in self.ranks.values():
            process.close()
