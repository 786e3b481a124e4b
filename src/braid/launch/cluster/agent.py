"""An agent: starts ranks on its host for a launcher on another host, and never outlives it.

    python -m braid.launch.cluster.agent_main    started by a `Placement`; uses stdin and stdout
    serve(connection, ...)                       in a launcher that has joined node 0

Problem: when an ssh connection breaks, the programs that it has started keep running remotely.

Idea: the agent polls its children and its launcher. When the stream from the launcher ends, the
agent kills its ranks and all processes that they have started. When the agent itself is killed, the
kernel kills its ranks (PR_SET_PDEATHSIG) and the orphan reaper kills the remaining processes.

Source: Horovod's task service (horovod/runner/task), without pickled messages.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from signal import SIGCHLD, SIGTERM
from typing import NamedTuple

import psutil

from braid._version import __version__
from braid.errors import ConfigError
from braid.launch.cluster.agent_channel import MESSAGES_PER_TURN, AgentChannel, van_config
from braid.launch.cluster.agent_messages import (
    AGENT_ROLE,
    AGENT_SCHEMA,
    AgentBye,
    AgentHello,
    AgentRefused,
    Finish,
    Finished,
    Greeting,
    HostAddresses,
    Ping,
    Pong,
    Prepare,
    Prepared,
    ProbeRequest,
    ProbeResult,
    Signalled,
    SignalRequest,
    StackRequest,
    Start,
)
from braid.launch.cluster.agent_ranks import AgentRanks
from braid.launch.cluster.probe import ProbeListener, Prober
from braid.launch.process.free_port import PortReservation
from braid.launch.process.job import JobSpec, check_command
from braid.launch.process.processes import (
    SignalInbox,
    end_descendants,
    orphan_reaper,
    subreaper,
)
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.closing import Closing
from braid.runtime.message import FrameStream, Message, PeerLost, PipeVan
from braid.runtime.rendezvous.interfaces import interfaces, machine
from braid.runtime.wire import Secret

__all__ = ["LOST_EXIT_CODE", "JoinRequest", "serve"]

SILENCE_S = 60.0  # after which the launcher counts as lost
LAUNCHER_NODE = "launcher"
LOST_EXIT_CODE = 1


class JoinRequest(NamedTuple):
    """Options of a launcher that joins another launcher as an agent.

    Attributes:
        node_rank: Value of `--node-rank`.
        num_nodes: Value of `--nnodes`.
        slots: Value of `-n`.
        command: Command of the ranks.
        secret: Secret of all nodes.
        is_on_engine: Whether an engine (Ray, Slurm or MPI) has started the agent. It may
            send SIGTERM repeatedly while ranks save, and kills processes that take too long.
    """

    node_rank: int | None
    num_nodes: int
    slots: int
    command: tuple[str, ...]
    secret: Secret
    is_on_engine: bool = False


def serve(
    stream: FrameStream,
    *,
    join_request: JoinRequest | None = None,
    clock: Clock | None = None,
    notice: Callable[[str], None] = lambda _: None,
) -> AgentBye:
    """Serve as this host's agent, which starts ranks, until the launcher ends the run or is lost.

    Args:
        stream: Stream to the launcher; owned and closed.
        join_request: Options of a launcher that joins another launcher as its agent; None if the
            launcher has started this process as an agent.
        clock: Time source; the monotonic clock of the host when None.
        notice: Shows a text to a user on this host.

    Returns:
        Outcome of the run.

    Raises:
        ConfigError: The launcher refused this node.
    """
    with (
        SignalInbox() as inbox,
        subreaper(),
        _Agent(stream, inbox, join_request, clock, notice) as agent,
    ):
        return agent.run()


class _Agent(Closing):
    """One agent; closing it ends all processes that it has started."""

    def __init__(
        self,
        stream: FrameStream,
        inbox: SignalInbox,
        join_request: JoinRequest | None,
        clock: Clock | None,
        notice: Callable[[str], None],
    ) -> None:
        self._clock = clock or MonotonicClock()
        self._inbox = inbox
        self._join_request = join_request
        self._notice = notice
        self._known = frozenset(p.pid for p in psutil.Process().children(recursive=True))
        self._bye: AgentBye | None = None
        self._refused = ""
        self._has_lost_launcher = False
        self._num_signals = 0
        self._is_on_engine = join_request is not None and join_request.is_on_engine
        self._run_id = ""
        self._node = -1
        self._secret: Secret | None = join_request.secret if join_request is not None else None
        self._probe_listener: ProbeListener | None = None
        self._prober: Prober | None = None
        self._ranks: AgentRanks | None = None
        self._save_s = 0.0
        with ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._van = stack.enter_context(
                PipeVan(AGENT_ROLE, AGENT_SCHEMA, config=van_config(SILENCE_S), clock=self._clock)
            )
            self._van.attach(LAUNCHER_NODE, stream)
            self._channel = AgentChannel(self._van, LAUNCHER_NODE)
            self._selector.register(inbox, selectors.EVENT_READ, self._on_signals)
            self._selector.register(self._van, selectors.EVENT_READ, self._on_readable)
            self._stack = stack.pop_all()

    def run(self) -> AgentBye:
        """Send an `AgentHello` to the launcher and serve it until the end of the run."""
        options = () if self._join_request is None else self._join_request[:4]
        self._channel.send(AgentHello(__version__, socket.gethostname(), os.getpid(), *options))
        while self._bye is None:
            for key, _ in self._selector.select(self._pause_s()):
                key.data()
            self._poll()
        if self._refused:
            raise ConfigError(self._refused)
        if self._has_lost_launcher and self._ranks is not None and self._save_s:
            self._wait_for_saves(self._ranks)
        return self._bye

    def _wait_for_saves(self, ranks: AgentRanks) -> None:
        """Ask the ranks of an elastic run to save and end, and wait until they have done so."""
        ranks.notify()
        end_ns = self._clock.after_ns(self._save_s)
        while ranks.num_alive and (now_ns := self._clock.now_ns()) < end_ns:
            for key, _ in self._selector.select((end_ns - now_ns) / 1e9):
                key.data()
            ranks.poll()

    def close(self) -> None:
        """End the ranks and release all resources."""
        if self._prober is not None:
            self._prober.close()
        if self._probe_listener is not None:
            self._probe_listener.close()
        self._end_ranks()
        self._stack.close()

    def _pause_s(self) -> float | None:
        due = []
        if self._probe_listener is not None and self._probe_listener.deadline_ns is not None:
            due.append(self._probe_listener.deadline_ns)
        if self._prober is not None:
            due.append(self._prober.next_ns)
        if self._ranks is not None and self._ranks.deadline_ns is not None:
            due.append(self._ranks.deadline_ns)
        return max(0.0, (min(due) - self._clock.now_ns()) / 1e9) if due else None

    def _poll(self) -> None:
        if self._probe_listener is not None:
            self._probe_listener.poll()
        if self._prober is not None:
            attempts = self._prober.poll()
            if attempts is not None:
                self._prober = None
                self._channel.send(ProbeResult(tuple(attempts)))
        if self._ranks is not None:
            self._ranks.poll()

    def _on_signals(self) -> None:
        for signum in self._inbox.drain():
            if signum != SIGCHLD:
                if self._num_signals and signum == SIGTERM and self._is_on_engine:
                    continue
                self._num_signals += 1
                self._channel.send(Signalled(signum))
                if self._num_signals > 1:
                    self._bye = AgentBye(128 + signum, "braid: ended by a second signal")
        if self._ranks is not None:
            self._ranks.reap()

    def _end_run(self, why: str) -> None:
        if self._bye is None:
            self._bye = AgentBye(LOST_EXIT_CODE, f"braid: {why}; its ranks on this host were ended")

    def _on_readable(self) -> None:
        """Process the launcher's messages that have arrived."""
        for _ in range(MESSAGES_PER_TURN):
            delivery = self._van.try_recv() if self._bye is None else None
            if delivery is None:
                return
            self._on_message(delivery.message, delivery.buffers)

    def _on_message(self, message: Message, buffers: Sequence[memoryview]) -> None:
        if isinstance(message, Greeting):
            self._on_greeting(message, buffers)
        elif isinstance(message, AgentRefused):
            self._refused, self._bye = message.reason, AgentBye(2)
        elif isinstance(message, AgentBye):
            self._bye = message
        elif isinstance(message, PeerLost):
            self._has_lost_launcher = True
            silent = f"the launcher has been silent for {SILENCE_S:g} s"
            self._end_run(silent if message.silent else "the launcher has closed the connection")
        elif isinstance(message, Ping):
            self._channel.send(Pong(message.t_ns, self._clock.now_ns()))
        elif isinstance(message, Finish):
            self._end_ranks()
            self._channel.send(Finished())
        else:
            self._execute(message)

    def _execute(self, message: Message) -> None:
        """Execute a request that needs the job's secret, or ranks."""
        if self._secret is None:
            self._end_run(f"the launcher sent {type(message).__name__} before its greeting")
        elif isinstance(message, ProbeRequest):
            self._prober = Prober(
                self._node,
                message.targets,
                self._run_id,
                self._secret,
                limit_s=message.limit_s,
                clock=self._clock,
                selector=self._selector,
            )
        elif isinstance(message, Prepare):
            self._channel.send(self._prepare(message, self._secret))
        elif self._ranks is not None:
            if isinstance(message, Start):
                self._ranks.start(message.environment, message.num_threads)
            elif isinstance(message, SignalRequest):
                self._ranks.signal(message)
            elif isinstance(message, StackRequest):
                self._ranks.request_stack(message.handlers)

    def _on_greeting(self, greeting: Greeting, buffers: Sequence[memoryview]) -> None:
        self._run_id, self._node = greeting.run_id, greeting.node
        if buffers:
            self._secret = Secret(bytes(buffers[0]))
        problem = ""
        if greeting.cwd:
            try:
                os.chdir(greeting.cwd)
            except OSError as exc:
                problem = (
                    f"cannot run in the directory {greeting.cwd}: {exc.strerror}; make it on this "
                    "host as well, or run in a directory that all hosts have"
                )
        assert self._secret is not None
        self._probe_listener = ProbeListener(
            self._node, interfaces(), self._run_id, self._secret, self._clock
        )
        self._probe_listener.register(self._selector)
        self._channel.send(HostAddresses(machine(), tuple(self._probe_listener.endpoints), problem))

    def _prepare(self, wanted: Prepare, secret: Secret) -> Prepared:
        if self._probe_listener is not None and not wanted.may_grow:
            self._probe_listener.close()
            self._probe_listener = None
        try:
            job = JobSpec(
                command=wanted.command,
                kind=wanted.kind,
                num_ranks=wanted.num_ranks,
                threads=wanted.threads,
                environ={**_sockets(wanted.interface), **os.environ, **wanted.environ},
            )
            check_command(job)
            port = 0
            if wanted.master_addr:
                kept = PortReservation(wanted.port or None, wanted.master_addr)
                port = self._stack.enter_context(kept).port
        except ConfigError as exc:
            return Prepared(problem=f"cannot run this: {exc}")
        self._known |= {self._stack.enter_context(orphan_reaper(self._run_id, 0.0))}
        self._save_s = wanted.save_s
        self._ranks = AgentRanks(
            job, secret, self._channel, self._selector, self._clock, look_s=wanted.look_s
        )
        return Prepared(port, self._ranks.threads)

    def _end_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return
        ranks.kill()
        mark = {"BRAID_RUN_ID": self._run_id}
        end_descendants(ranks.pids, mark, all_new=True, known=self._known)
        ranks.close()


def _sockets(interface: str) -> dict[str, str]:
    """Return variables that make torch's backends use `interface`, instead of the host name's."""
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
