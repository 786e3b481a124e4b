"""The launcher for one host.

Problem: a launcher of N processes must notice a death immediately, inform the remaining ranks and
collect all errors. It must leave no process behind and name the rank that caused the failure. Shell
loops and `mp.spawn` do a part of this. torchrun polls its workers and restarts them.

Idea: a `RankBackend` starts ranks, on one host or several; `supervision` supervises them, wherever
they run. This module combines the two for one host, where ranks are child processes of the
launcher; `several_hosts` does so for more.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import psutil

from braid.launch.process.child import LauncherInput
from braid.launch.process.console import QuietConsole
from braid.launch.process.fork_server import ForkServer
from braid.launch.process.free_port import PortReservation
from braid.launch.process.job import (
    JobSpec,
    Outcome,
    check_command,
    choose_threads,
    command_line,
    rank_environ,
)
from braid.launch.process.oom import OomMonitor
from braid.launch.process.output import Console
from braid.launch.process.processes import (
    SignalInbox,
    changes_of,
    end_descendants,
    orphan_reaper,
    subreaper,
)
from braid.launch.supervise.backend import OnChange, OnSignal, RankPlacement, RankSpec
from braid.launch.supervise.rank import Rank
from braid.launch.supervise.rank_process import RankProcess
from braid.launch.supervise.slots import SlotSource
from braid.launch.supervise.supervision import carry_out
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.closing import Closing
from braid.runtime.diagnose.run_record import RunHost
from braid.runtime.diagnose.verdict import MemoryKill
from braid.runtime.wire import Secret

__all__ = ["LocalBackend", "Supervisor"]

ADDRESS = "127.0.0.1"


class Supervisor:
    """Starts the ranks of jobs on this host, and watches them.

    Args:
        console: Console for output and notices; kept in memory when None.
        clock: Time source; the monotonic clock of the host when None.
        owns_process: Whether this process does nothing but launch. Every descendant left at the end
            of a run is then ended, even one without the run's environment.
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

    def run(self, job: JobSpec, slots: SlotSource | None = None) -> Outcome:
        """Run a job to its end; signals of this process are forwarded to the ranks.

        Args:
            job: Job to run.
            slots: Source of the number of ranks of an elastic run; None if the number is fixed.

        Returns:
            Outcome of the run; failures of ranks are outcomes, not exceptions.

        Raises:
            ConfigError: The job cannot be started; no process is left running.
        """
        check_command(job)
        with SignalInbox() as inbox, LocalBackend(job, owns_process=self._owns_process) as backend:
            return carry_out(job, self._console, self._clock, inbox, backend, slots)


class LocalBackend(Closing):
    """Starts ranks as children of this process; a context manager.

    Args:
        job: Job to run.
        owns_process: Whether this process does nothing but launch; see `Supervisor`.

    Raises:
        ConfigError: The port of the job is in use.
    """

    spans_hosts = False
    is_on_engine = False
    deadline_ns: int | None = None

    def __init__(self, job: JobSpec, *, owns_process: bool = False) -> None:
        self.run_id = secrets.token_hex(8)
        self.secret = Secret.generate()
        self._job = job
        self._owns_process = owns_process
        self._known = frozenset(p.pid for p in psutil.Process().children(recursive=True))
        self._memory = OomMonitor.of_this_process()
        self._threads, reason = choose_threads(job)
        self._input = None if job.stdin_rank is None else LauncherInput()
        self.hosts = (RunHost(name=socket.gethostname(), address=ADDRESS, num_ranks=job.num_ranks),)
        self.threads = f"{self._threads} ({reason})"
        self._argv = command_line(job)
        self._ranks: dict[int, RankProcess] = {}
        self._on_change: OnChange | None = None
        self._server: ForkServer | None = None
        with ExitStack() as stack:
            stack.enter_context(subreaper())
            if job.elastic is not None:  # its ranks outlive a killed launcher to save
                reaper = stack.enter_context(orphan_reaper(self.run_id, job.interrupt_limit_s))
                self._known |= {reaper}
            self._port = stack.enter_context(PortReservation(job.port)).port
            self._secret_fd = self.secret.to_fd()
            stack.callback(os.close, self._secret_fd)
            self._stack = stack.pop_all()

    @property
    def store_address(self) -> str:
        """Address on which the store listens."""
        if sys.platform != "linux" or self._job.environ.get("BRAID_PORTABLE") == "1":
            return f"tcp://{ADDRESS}:0"
        return f"unix:@braid-{self.run_id}"

    def address_for_rank(self, listening: str) -> str:
        """Return `listening`: on one host, ranks reach the store where it listens."""
        return listening

    def attach(
        self,
        selector: selectors.BaseSelector,  # noqa: ARG002 - ranks bring their own descriptors
        *,
        on_change: OnChange,
        on_signal: OnSignal,  # noqa: ARG002 - the launcher receives its own signals itself
        notice: Callable[[str], None],
    ) -> None:
        """Report state changes of ranks from now on; see `RankBackend.attach`."""
        self._on_change = on_change
        if self._input is not None and self._input.is_terminal:
            notice(
                f"rank {self._job.stdin_rank} has the terminal, and its log has no stdout; hang "
                "reports and deadlines of collectives wait"
            )

    def detach(self) -> None:
        """Stop reporting state changes."""
        self._on_change = None

    def placement(self, place: int, host: str = "") -> RankPlacement:  # noqa: ARG002 - this host
        """Return the placement of a rank."""
        size = max(self._job.num_ranks, place + 1)  # a spare has a separate place
        return RankPlacement(place, size, 0, 1, ADDRESS, self._port, "")

    def start(self, spec: RankSpec) -> Rank:
        """Start a rank."""
        environment = replace(
            spec.environment,
            secret_fd=self._secret_fd,
            events_fd=spec.box.events_fd,
            stacks_fd=spec.box.stacks_fd,
            debugged=self._job.stdin_rank is not None,
        )
        environ = rank_environ(self._job.environ, environment, self._threads)
        rank = RankProcess(
            environment.rank,
            self._argv,
            environ=environ,
            pass_fds=[self._secret_fd],
            box=spec.box,
            output=spec.output,
            selector=spec.selector,
            on_message=spec.on_message,
            clock=spec.clock,
            stdin=self._input if environment.rank == self._job.stdin_rank else None,
            server=self._server,
        )
        self._server = self._server or ForkServer.of(self._job, environment, self._argv, environ)
        self._ranks[environment.rank] = rank
        return rank

    def reap(self) -> None:
        """Report the state changes of all ranks."""
        for rank in list(self._ranks.values()):
            for change in changes_of(rank.pid) if rank.alive else ():
                if self._on_change is not None:
                    self._on_change(rank, change)

    def poll(self) -> None:
        """Start the fork server when any rank has joined the job."""
        alive = [rank for rank in self._ranks.values() if rank.alive]
        if self._server is not None and any(rank.box.has_events for rank in alive):
            self._server.start()

    def memory_kill(self) -> MemoryKill | None:
        """Return the facts about an out-of-memory kill since the last call."""
        return self._memory.new_kill()

    def finish(self) -> Iterator[int]:
        """End the processes that ranks have left behind, in one step."""
        self._end_server()
        end_descendants(
            [rank.pid for rank in self._ranks.values()],
            {"BRAID_RUN_ID": self.run_id},
            all_new=self._owns_process,
            known=self._known,
        )
        yield from ()

    def dismiss(self, exit_code: int, text: str) -> None:
        """Do nothing: there are no agents."""

    def close(self) -> None:
        """Release all resources. Idempotent."""
        self._end_server()
        self._stack.close()

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.close()
