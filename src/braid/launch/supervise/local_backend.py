"""A backend of one host: the launcher starts the ranks itself, and is told of their ends by the kernel."""

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

from braid.diagnose import MemoryKill, RunHost
from braid.launch.process.free_port import PortReservation
from braid.launch.process.job import JobSpec, choose_threads, command_line, inherited
from braid.launch.process.oom import MemoryWatch
from braid.launch.process.processes import changes_of, end_descendants, subreaper
from braid.launch.supervise.backend import OnChange, OnSignal, RankPlacement, RankSpec
from braid.launch.supervise.rank import Rank
from braid.launch.supervise.rank_process import RankProcess
from braid.wire import Secret

__all__ = ["LocalBackend"]

ADDRESS = "127.0.0.1"


class LocalBackend:
    """Starts ranks as children of this process; a context manager.

    Args:
        job: What to run.
        owns_process: See `Supervisor`.

    Raises:
        ConfigError: The port of the job is in use.
    """

    spans_hosts = False
    deadline_ns: int | None = None

    def __init__(self, job: JobSpec, *, owns_process: bool = False) -> None:
        self.run_id = secrets.token_hex(8)
        self.secret = Secret.generate()
        self._job = job
        self._owns_process = owns_process
        self._known = frozenset(child.pid for child in psutil.Process().children())
        self._memory = MemoryWatch.of_this_process()
        self._threads, reason = choose_threads(job)
        self.hosts = (RunHost(name=socket.gethostname(), address=ADDRESS, num_ranks=job.num_ranks),)
        self.threads = f"{self._threads} ({reason})"
        self._argv = command_line(job)
        self._ranks: dict[int, RankProcess] = {}
        self._on_change: OnChange | None = None
        with ExitStack() as stack:
            stack.enter_context(subreaper())
            self._port = stack.enter_context(PortReservation(job.port)).port
            self._secret_fd = self.secret.to_fd()
            stack.callback(os.close, self._secret_fd)
            self._stack = stack.pop_all()

    @property
    def store_address(self) -> str:
        """Where the store shall listen."""
        if sys.platform != "linux" or self._job.environ.get("BRAID_PORTABLE") == "1":
            return f"tcp://{ADDRESS}:0"
        return f"unix:@braid-{self.run_id}"

    def address_for_rank(self, listening: str) -> str:
        """How ranks reach the store: where it listens."""
        return listening

    def join(
        self,
        selector: selectors.BaseSelector,  # noqa: ARG002 - ranks bring their own descriptors
        *,
        on_change: OnChange,
        on_signal: OnSignal,  # noqa: ARG002 - the launcher hears of its own signals itself
        notice: Callable[[str], None],  # noqa: ARG002 - nothing to say
    ) -> None:
        """Say what happens to ranks from now on."""
        self._on_change = on_change

    def leave(self) -> None:
        """Say nothing any more."""
        self._on_change = None

    def place(self, rank: int) -> RankPlacement:
        """Where a rank stands."""
        size = self._job.num_ranks
        return RankPlacement(rank, size, 0, 1, ADDRESS, self._port, "")

    def start(self, spec: RankSpec) -> Rank:
        """Start a rank."""
        told = replace(
            spec.told,
            secret_fd=self._secret_fd,
            events_fd=spec.box.events_fd,
            stacks_fd=spec.box.stacks_fd,
        )
        rank = RankProcess(
            told.rank,
            self._argv,
            environ=inherited(self._job.environ, told, self._threads),
            pass_fds=[self._secret_fd],
            box=spec.box,
            output=spec.output,
            selector=spec.selector,
            on_message=spec.on_message,
            clock=spec.clock,
        )
        self._ranks[told.rank] = rank
        return rank

    def reap(self) -> None:
        """Look what the ranks have done."""
        for rank in list(self._ranks.values()):
            for change in changes_of(rank.pid) if rank.alive else ():
                if self._on_change is not None:
                    self._on_change(rank, change)

    def poll(self) -> None:
        """Nothing is ever due: signals and descriptors say everything."""

    def memory_kill(self) -> MemoryKill | None:
        """What the kernel says about a kill for memory since the last call."""
        return self._memory.new_kill()

    def finish(self) -> Iterator[int]:
        """End what ranks have left behind, at once."""
        end_descendants(
            [rank.pid for rank in self._ranks.values()],
            {"BRAID_RUN_ID": self.run_id},
            all_new=self._owns_process,
            known=self._known,
        )
        yield from ()

    def dismiss(self, exit_code: int, text: str) -> None:
        """Nobody else is there to be told."""

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._stack.close()

    def __enter__(self) -> LocalBackend:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
