"""The ranks of one host, which its agent starts and reports on to the launcher.

An agent takes no decisions. It does for its children what only a parent on the same host can do:
start, signal and reap them, and read their pipes and memory.
"""

from __future__ import annotations

import os
import selectors
from contextlib import ExitStack, suppress
from dataclasses import replace
from signal import SIGKILL, SIGTERM, SIGUSR1
from typing import NamedTuple

from braid.launch.cluster.agent_channel import AgentChannel
from braid.launch.cluster.agent_messages import (
    FinalRecord,
    NotStarted,
    OpenWaits,
    Output,
    ProcessChanged,
    RankSnapshot,
    RankStarted,
    SignalRequest,
)
from braid.launch.process.black_box import BlackBox
from braid.launch.process.child import Child
from braid.launch.process.fork_server import ForkServer
from braid.launch.process.hang_state import STACKS_NS, OpenWait
from braid.launch.process.job import JobSpec, choose_threads, command_line, rank_environ
from braid.launch.process.oom import OomMonitor
from braid.launch.process.processes import Change, changes_of
from braid.launch.process.rank_snapshot import RankObserver
from braid.runtime.clock import Clock
from braid.runtime.rendezvous import JobEnvironment
from braid.runtime.wire import Secret

__all__ = ["AgentRanks"]

MAX_QUEUED_BYTES = 8 << 20  # beyond which ranks that print are paused
FULL_LOOK_NS = 10_000_000  # in which a network of 100 MB/s carries an eighth of the queue


class _Kept(NamedTuple):
    """A child, its black box and its observer."""

    child: Child
    box: BlackBox
    look: RankObserver


class AgentRanks:
    """Starts ranks and reports their state changes to the launcher.

    Args:
        job: Job of the ranks.
        secret: Secret of the job.
        channel: Channel to the launcher.
        selector: Selector that polls the pipes of ranks; the data of a key is the function to call.
        clock: Time source.
        look_s: Seconds between `OpenWaits` messages; 0 for none.

    Attributes:
        threads: OMP_NUM_THREADS of each rank, with the reason for the choice.
    """

    def __init__(
        self,
        job: JobSpec,
        secret: Secret,
        channel: AgentChannel,
        selector: selectors.BaseSelector,
        clock: Clock,
        *,
        look_s: float,
    ) -> None:
        self._job = job
        self._argv = command_line(job)
        self._num_threads, reason = choose_threads(job)
        self.threads = f"{self._num_threads} ({reason})"
        self._secret_fd = secret.to_fd()
        self._channel = channel
        self._selector = selector
        self._clock = clock
        self._memory = OomMonitor.of_this_process()
        self._ranks: dict[int, _Kept] = {}
        self._server: ForkServer | None = None
        self._signalled: set[int] = set()
        self._every_ns = round(look_s * 1e9)
        self._look_ns = clock.now_ns()
        self._seen_ns: int | None = None
        self._sent_waits: tuple[OpenWait, ...] = ()
        self._is_full = False

    @property
    def pids(self) -> list[int]:
        """Process ids of all ranks so far."""
        return [kept.child.pid for kept in self._ranks.values()]

    @property
    def deadline_ns(self) -> int | None:
        """Time at which `poll` is due; None while there is no such time."""
        due = [self._look_ns] if self._ranks and self._every_ns else []
        if self._seen_ns is not None:
            due.append(self._seen_ns)
        if self._is_full:
            due.append(self._clock.now_ns() + FULL_LOOK_NS)
        return min(due, default=None)

    def start(self, environment: JobEnvironment, num_threads: str) -> None:
        """Start a rank and report its process id, or the reason of the failure."""
        rank = environment.rank
        try:
            with ExitStack() as undo:
                box = undo.enter_context(BlackBox(rank))
                environment = replace(
                    environment,
                    secret_fd=self._secret_fd,
                    events_fd=box.events_fd,
                    stacks_fd=box.stacks_fd,
                )
                environ = rank_environ(
                    self._job.environ, environment, num_threads or self._num_threads
                )
                child = Child(
                    self._argv,
                    environ=environ,
                    pass_fds=[self._secret_fd, box.events_fd, box.stacks_fd],
                    selector=self._selector,
                    on_output=lambda stream, chunk: self._channel.send(Output(rank, stream), chunk),
                    server=self._server,
                )
                undo.pop_all()
        except OSError as exc:
            self._channel.send(NotStarted(rank, exc.strerror or str(exc)))
            return
        self._server = self._server or ForkServer.of(self._job, environment, self._argv, environ)
        look = RankObserver(rank, child.pid, box, self._clock, with_links=True)
        self._ranks[rank] = _Kept(child, box, look)
        self._channel.send(RankStarted(rank, child.pid))

    @property
    def num_alive(self) -> int:
        """Number of ranks that have not ended."""
        return sum(kept.child.alive for kept in self._ranks.values())

    def notify(self) -> None:
        """Send SIGTERM to all ranks: elastic trainings save after their step and end."""
        for kept in self._ranks.values():
            kept.child.signal(SIGTERM)

    def signal(self, message: SignalRequest) -> None:
        """Send a signal to a rank."""
        kept = self._ranks.get(message.rank)
        if kept is not None:
            if message.signum != SIGUSR1:
                self._signalled.add(message.rank)
            kept.child.signal(message.signum)

    def request_stack(self, handlers: tuple[int, ...]) -> None:
        """Request stacks from the ranks `handlers`; `poll` sends the answer a moment later."""
        for rank, kept in self._ranks.items():
            kept.look.request_stack(alive=kept.child.alive, answers=rank in handlers)
        self._seen_ns = self._clock.now_ns() + STACKS_NS // 2

    def reap(self) -> None:
        """Report the state changes of all ranks."""
        for rank, kept in self._ranks.items():
            for change in changes_of(kept.child.pid) if kept.child.alive else ():
                self._changed(rank, kept, change)

    def poll(self) -> None:
        """Pause or resume ranks that print, and take the other steps that are due."""
        alive = [kept for kept in self._ranks.values() if kept.child.alive]
        if self._server is not None and any(kept.box.has_events for kept in alive):
            self._server.start()
        now_ns = self._clock.now_ns()
        least = MAX_QUEUED_BYTES // 8 if self._is_full else MAX_QUEUED_BYTES
        self._is_full = self._channel.queued_bytes > least
        for kept in self._ranks.values():
            kept.child.pause(paused=self._is_full)
        if self._every_ns and now_ns >= self._look_ns:
            self._look_ns = now_ns + self._every_ns
            waits = tuple(wait for kept in alive for wait in kept.look.waits())
            if waits != self._sent_waits:
                self._sent_waits = waits
                self._channel.send(OpenWaits(waits))
        if self._seen_ns is not None and now_ns >= self._seen_ns:
            self._seen_ns = None
            views = [k.look.view(alive=k.child.alive) for k in self._ranks.values()]
            self._channel.send(RankSnapshot(tuple(views)))

    def kill(self) -> None:
        """Kill all living ranks and report their last output."""
        if self._server is not None:
            self._server.close()
        for kept in self._ranks.values():
            kept.child.signal(SIGKILL)
        for rank, kept in self._ranks.items():
            if kept.child.alive:
                with suppress(ChildProcessError):
                    kept.child.wait()
                self._changed(rank, kept, Change("killed", SIGKILL))

    def close(self) -> None:
        """Kill all living ranks and release all resources. Idempotent."""
        self.kill()
        for kept in self._ranks.values():
            kept.child.close()
            kept.box.close()
        self._ranks = {}
        if self._secret_fd >= 0:
            os.close(self._secret_fd)
            self._secret_fd = -1

    def _changed(self, rank: int, kept: _Kept, change: Change) -> None:
        t_ns = self._clock.now_ns()
        memory_kill = None
        if change.kind in {"exited", "killed"}:
            kept.child.reaped(change)
            kept.child.drain()
            if change[:2] == ("killed", SIGKILL) and rank not in self._signalled:
                memory_kill = self._memory.new_kill()
        if change.kind != "continued":
            pieces = kept.box.pieces()
            data = [bytes(piece) for _, piece in pieces]
            offsets = tuple(at for at, _ in pieces)
            self._channel.send(FinalRecord(rank, offsets), *data, kept.box.stacks().encode())
        self._channel.send(ProcessChanged(rank, change.kind, change.status, t_ns, memory_kill))
