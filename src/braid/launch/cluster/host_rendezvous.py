"""Gathers the hosts of a job: starts or awaits an agent on each host, until ranks can start there.

`HostRendezvousState` takes all decisions; this module executes them.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from signal import SIGCHLD, SIGINT

from braid._version import __version__
from braid.errors import ConfigError
from braid.launch.cluster.agent_handle import AgentHandle
from braid.launch.cluster.agent_messages import (
    AgentHello,
    Greeting,
    HostAddresses,
    Prepare,
    Prepared,
    ProbeRequest,
    ProbeResult,
)
from braid.launch.cluster.agent_registry import AgentRegistry
from braid.launch.cluster.host_rendezvous_state import (
    Greet,
    HostRendezvousPhase,
    HostRendezvousState,
    Instruction,
    ProbeTargets,
)
from braid.launch.cluster.join import own_addresses
from braid.launch.cluster.join_listener import JoinListener
from braid.launch.cluster.options import (
    OF_THE_JOB,
    EngineHosts,
    Hosts,
    Nodes,
    forwarded,
    node_secret,
)
from braid.launch.cluster.probe import ProbeListener, Prober
from braid.launch.cluster.rank_assignment import Host, RankPlace, assign
from braid.launch.cluster.reachability import LAUNCHER
from braid.launch.cluster.remote_backend import HostsReady, RemoteBackend
from braid.launch.cluster.remote_shell import LocalPlacement, Placement
from braid.launch.process.hang_state import LOOKS_PER_LIMIT
from braid.launch.process.job import JobSpec
from braid.launch.process.processes import SignalInbox
from braid.runtime.clock import Clock
from braid.runtime.closing import Closing
from braid.runtime.diagnose.verdict import signal_name
from braid.runtime.message import Message
from braid.runtime.rendezvous.interfaces import interfaces, machine
from braid.runtime.wire import SECRET_BYTES, Secret

__all__ = ["HostRendezvous"]

PROBE_LIMIT_S = 4.0  # twice a lost SYN and its repetitions; a report appears within 10 s
PATIENCE_NS = 10_000_000_000  # until the first notice about missing nodes; then three times longer


class HostRendezvous(Closing):
    """Gathers hosts; a context manager that owns their agents, which start the ranks.

    Args:
        job: Job that the hosts will run.
        where: Hosts of the job.
        inbox: Signals of this process; None if another object polls them.
        clock: Time source.
        notice: Shows a text to the user.
        run: Backend of the run that these hosts join; None for a new run.
        first_node: Number of the first host.
        may_grow: Whether further hosts may join the run.
    """

    def __init__(
        self,
        job: JobSpec,
        where: Hosts | Nodes | EngineHosts,
        inbox: SignalInbox | None,
        clock: Clock,
        notice: Callable[[str], None],
        *,
        run: RemoteBackend | None = None,
        first_node: int = 0,
        may_grow: bool = False,
    ) -> None:
        self._job = job
        self._where = where
        self._inbox = inbox
        self._clock = clock
        self._notice = notice
        self._run = run
        self._may_grow = may_grow or run is not None
        self._run_id = run.run_id if run is not None else secrets.token_hex(8)
        self._first_node = first_node
        self._agents: dict[int, AgentHandle] = {}
        self._prober: Prober | None = None
        self._prepared: dict[int, Prepared] = {}
        self._places: tuple[RankPlace, ...] = ()
        self._join_listener: JoinListener | None = None
        self._next_notice_ns = clock.now_ns() + PATIENCE_NS
        self._wait_ns = PATIENCE_NS
        self._stack = ExitStack()
        by_hand = isinstance(where, Nodes)
        if run is not None:
            self._secret = run.secret
        else:
            self._secret = node_secret(where) if isinstance(where, Nodes) else Secret.generate()
        names: dict[int, str] = {}
        num_nodes = 0
        limit_s = 0.0
        if isinstance(where, Nodes):
            num_nodes, limit_s = where.meeting.num_nodes, where.join_limit_s
        else:
            places = assign(where.hosts, where.num_ranks)
            self._places = tuple(place._replace(node=first_node + place.node) for place in places)
            num_nodes, limit_s = len({p.node for p in self._places}), where.start_limit_s
            names = {first_node + n: host.name for n, host in enumerate(where.hosts[:num_nodes])}
        with ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            if inbox is not None:
                self._selector.register(inbox, selectors.EVENT_READ, self._on_signals)
            address = run.hosts_ready.addresses[LAUNCHER] if run is not None else ""
            usable = [i for i in interfaces() if run is None or i.ip == address]
            self._probe_listener = ProbeListener(
                LAUNCHER, usable, self._run_id, self._secret, clock
            )
            stack.callback(self._probe_listener.close)
            self._probe_listener.register(self._selector)
            self._state = HostRendezvousState(
                names,
                num_nodes,
                own_addresses=HostAddresses(machine(), tuple(self._probe_listener.endpoints)),
                version=__version__,
                wanted=where.interfaces,
                first_node=first_node,
                may_grow=may_grow,
                limit_s=limit_s,
                now_ns=clock.now_ns(),
            )
            self._registry = AgentRegistry(clock)
            stack.callback(self._registry.close)
            stack.callback(self._end_probing)
            self._registry.register(self._selector)
            self._stack = stack.pop_all()
        self._by_hand = by_hand

    def gather(self, join_listener: JoinListener | None = None) -> RemoteBackend:
        """Wait until all hosts are ready.

        Args:
            join_listener: Listener for launchers that join; not owned. None if the user starts no
                other launcher.

        Returns:
            Backend for the gathered hosts; this object still owns the agents.

        Raises:
            ConfigError: A host cannot take part; the message names all such hosts.
            KeyboardInterrupt: The user has pressed Ctrl-C.
        """
        self._join_listener = join_listener
        self.start_agents()
        while not self.has_ended:
            self.step(self._pause_s())
        return RemoteBackend(self.hosts_ready(), self._clock)

    @property
    def has_ended(self) -> bool:
        """Whether all hosts are ready, or a host cannot take part."""
        return self._state.phase in {HostRendezvousPhase.READY, HostRendezvousPhase.FAILED}

    @property
    def problems(self) -> Mapping[str, str]:
        """Clauses such as `has no agent` about the hosts that cannot take part, by name."""
        return {self._state.name(node): why for node, why in self._state.problems.items()}

    def step(self, limit_s: float = 0.0) -> None:
        """Process events, and wait at most `limit_s` seconds for one."""
        for key, _ in self._selector.select(limit_s):
            key.data()
        self._poll()

    def hosts_ready(self) -> HostsReady:
        """Return the gathered hosts, whose agents this object still owns.

        Raises:
            ConfigError: A host cannot take part; the message names all such hosts.
        """
        if self._state.phase is HostRendezvousPhase.FAILED:
            problem = self._state.problem
            for agent in self._agents.values():
                agent.end(2, f"braid: nothing was started (exit 2)\n  problem  {problem}")
            raise ConfigError(problem)
        self._registry.unregister()
        self._probe_listener.close()
        if self._run is not None and self._join_listener is not None:
            self._join_listener.close()
        for names in self._state.shared_machines:
            listed = ", ".join(names)
            self._notice(f"{listed} are one machine: ranks with the same LOCAL_RANK share devices")
        return HostsReady(
            self._run_id,
            self._secret,
            self._registry,
            self._agents,
            self._state.reach.addresses,
            self._state.endpoints,
            self._places,
            max(prepared.port for prepared in self._prepared.values()),
            *self._threads(),
            self._where.listen,
            self._join_listener,
            self._where.starter if isinstance(self._where, EngineHosts) else None,
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all hosts, once the hosts are gathered."""
        return len(self._places)

    def abandon(self) -> None:
        """Close without waiting for agents, which have no ranks yet."""
        for agent in self._agents.values():
            agent.kill()
        self.close()

    def close(self) -> None:
        """Close all agents, which then end their ranks. Idempotent."""
        self._stack.close()

    # Agents

    def start_agents(self) -> None:
        """Start an agent on each host, or ask an engine to start them.

        Raises:
            ConfigError: An agent cannot be started.
        """
        where = self._where
        if isinstance(where, EngineHosts):
            addresses = own_addresses(where.interfaces)
            self._join_listener = JoinListener(addresses, self._secret, self._clock)
            self._stack.callback(self._join_listener.close)
            if self._run is None:  # else the starter is registered with the selector of the run
                where.starter.register(self._selector)
                self._stack.callback(where.starter.unregister)
            nodes = {node: self._state.name(node) for node in self._state.missing}
            where.starter.invite(
                self._join_listener.addresses, nodes, _key(self._secret), where.start_limit_s
            )
        elif isinstance(where, Nodes):
            self._start_agent(0, socket.gethostname(), LocalPlacement())
        else:
            hosts = where.hosts[: len({p.node for p in self._places})]
            for node, host in enumerate(hosts, self._first_node):
                self._start_agent(node, host.name, where.placement(host))
        if self._join_listener is not None:
            self._join_listener.register(self._selector, self._registry, self._judge, self._notice)
            self._stack.callback(self._join_listener.unregister)

    def _start_agent(self, node: int, name: str, placement: Placement) -> None:
        self._agents[node] = self._registry.start(
            node, name, placement, self._on_message, self._on_lost
        )

    def _judge(self, agent: AgentHandle) -> str:
        """Accept a launcher that asks to join, or return the reason for the refusal."""
        hello, node = agent.hello, agent.node
        assert hello is not None
        if isinstance(self._where, EngineHosts):
            return self._judge_of_engine(agent, self._where)
        assert isinstance(self._where, Nodes)
        num_nodes = self._where.meeting.num_nodes
        if hello.num_nodes != num_nodes:
            return (
                f"node 0 has --nnodes {num_nodes}, but node {node} has --nnodes "
                f"{hello.num_nodes}: use one number on all nodes"
            )
        if not 0 < node < num_nodes:
            return f"--node-rank must be 1 to {num_nodes - 1}, got {node}"
        if node in self._agents:
            first = self._state.hello_of(node)
            other = f"{first.hostname} (pid {first.pid})" if first is not None else "another node"
            return (
                f"two nodes have --node-rank {node}, {other} and {hello.hostname} (pid "
                f"{hello.pid}): give each its own number"
            )
        if hello.command != self._job.command:
            ours, theirs = " ".join(self._job.command), " ".join(hello.command)
            return (
                f"commands differ, use the same on all nodes: `{ours}` on node 0, `{theirs}` on "
                f"node {node}"
            )
        names = {agent.name for agent in self._agents.values()}
        agent.name = hello.hostname if hello.hostname not in names else f"{hello.hostname}#{node}"
        self._admit(agent, hello)
        return ""

    def _judge_of_engine(self, agent: AgentHandle, where: EngineHosts) -> str:
        """Accept an agent that the engine has started, or return the reason for the refusal."""
        assert agent.hello is not None
        if agent.node not in self._state.missing:
            return (
                f"node {agent.node} is not one of the {len(where.hosts)} nodes, or has joined twice"
            )
        agent.name = self._state.name(agent.node)
        agent.explain = where.starter.why_lost
        self._admit(agent, agent.hello)
        return ""

    def _admit(self, agent: AgentHandle, hello: AgentHello) -> None:
        agent.on_message, agent.on_lost = self._on_message, self._on_lost
        self._agents[agent.node] = agent
        self._on_message(agent, hello, ())

    def _end_probing(self) -> None:
        if self._prober is not None:
            self._prober.close()

    # Events

    def _pause_s(self) -> float:
        due = [self._state.deadline_ns]
        if self._by_hand:
            due.append(self._next_notice_ns)
        if self._probe_listener.deadline_ns is not None:
            due.append(self._probe_listener.deadline_ns)
        if self._prober is not None:
            due.append(self._prober.next_ns)
        if self._join_listener is not None and self._join_listener.deadline_ns is not None:
            due.append(self._join_listener.deadline_ns)
        return max(0.0, (min(due) - self._clock.now_ns()) / 1e9)

    def _poll(self) -> None:
        self._state.peers = {} if self._run is None else self._run.running
        self._probe_listener.poll()
        if self._join_listener is not None:
            self._join_listener.poll()
        if self._prober is not None:
            attempts = self._prober.poll()
            if attempts is not None:
                self._prober = None
                now_ns = self._clock.now_ns()
                self._execute(self._state.on_probe_result(LAUNCHER, tuple(attempts), now_ns))
        now_ns = self._clock.now_ns()
        if self._by_hand and now_ns >= self._next_notice_ns and self._state.missing:
            self._wait_ns *= 3
            self._next_notice_ns = now_ns + self._wait_ns
            missing = ", ".join(map(str, self._state.missing))
            place = (
                ", ".join(self._join_listener.addresses) if self._join_listener is not None else ""
            )
            self._notice(f"waiting at {place} for --node-rank {missing}")
        elif now_ns >= self._next_notice_ns:
            self._next_notice_ns = now_ns + self._wait_ns
        if isinstance(self._where, EngineHosts):
            for node in self._state.missing:
                if why := self._where.starter.why_missing(node):
                    self._execute(self._state.on_lost(node, f"has no agent: {why}", now_ns))
        self._execute(self._state.tick(now_ns))

    def _on_signals(self) -> None:
        assert self._inbox is not None
        for signum in self._inbox.drain():
            if signum == SIGINT:
                raise KeyboardInterrupt
            if signum != SIGCHLD:
                msg = f"{signal_name(signum)} received before all hosts were ready"
                raise ConfigError(msg)

    def _on_lost(self, agent: AgentHandle, why: str) -> None:
        gathering = self._state.phase is HostRendezvousPhase.GATHERING
        if self._by_hand and agent.node != 0 and gathering:  # the user may start it again
            self._notice(f"node {agent.node} ({agent.name}) {why}; waiting for it to join again")
            self._state.forget(agent.node)
            del self._agents[agent.node]
            return
        self._execute(self._state.on_lost(agent.node, why, self._clock.now_ns()))

    def _on_message(
        self,
        agent: AgentHandle,
        message: Message,
        buffers: Sequence[memoryview],  # noqa: ARG002 - these messages have none
    ) -> None:
        now_ns = self._clock.now_ns()
        if isinstance(message, AgentHello):
            self._execute(self._state.on_hello(agent.node, message, now_ns, agent.name))
        elif isinstance(message, HostAddresses):
            self._execute(self._state.on_addresses(agent.node, message, now_ns))
        elif isinstance(message, ProbeResult):
            self._execute(self._state.on_probe_result(agent.node, message.attempts, now_ns))
        elif isinstance(message, Prepared):
            self._prepared[agent.node] = message
            self._execute(self._state.on_prepared(agent.node, message))

    def _execute(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Greet):
                self._greet(self._agents[instruction.node])
            elif isinstance(instruction, ProbeTargets):
                self._probe(instruction)
            else:
                self._prepare(instruction.node, instruction.address)

    def _greet(self, agent: AgentHandle) -> None:
        has_joined = self._by_hand and agent.node != 0
        cwd = "" if has_joined else str(Path.cwd())
        key = () if agent.has_joined else (_key(self._secret),)
        agent.send(Greeting(self._run_id, agent.node, cwd), *key)

    def _probe(self, probe: ProbeTargets) -> None:
        if probe.node != LAUNCHER:
            self._agents[probe.node].send(ProbeRequest(probe.targets, PROBE_LIMIT_S))
            return
        self._prober = Prober(
            LAUNCHER,
            probe.targets,
            self._run_id,
            self._secret,
            limit_s=PROBE_LIMIT_S,
            clock=self._clock,
            selector=self._selector,
        )

    def _prepare(self, node: int, address: str) -> None:
        if isinstance(self._where, Nodes):
            self._places = assign([Host(str(n), self._slots(n)) for n in sorted(self._agents)])
            variables = self._job.environ
            environ = (
                dict(variables)
                if node == 0
                else {n: variables[n] for n in OF_THE_JOB if n in variables}
            )
        else:
            environ = forwarded(self._job.environ, self._where.environ)
        self._agents[node].send(
            Prepare(
                self._job.command,
                self._job.kind,
                sum(place.node == node for place in self._places),
                self._job.threads,
                environ,
                self._state.reach.interfaces[node],
                min(1.0, self._job.hang_report_s / LOOKS_PER_LIMIT),
                self._job.interrupt_limit_s if self._job.elastic is not None else 0.0,
                address if node == 0 else "",  # of rank 0
                self._job.port or 0,
                self._may_grow,
            )
        )

    def _slots(self, node: int) -> int:
        hello = self._agents[node].hello
        assert isinstance(self._where, Nodes)
        return hello.slots if hello is not None and hello.slots else self._where.slots

    def _threads(self) -> tuple[str, str]:
        """Return OMP_NUM_THREADS of all ranks, empty if hosts choose it; and the same for the user.

        The bits of a sum depend on it, and any rank of an elastic run may compute a micro-batch.
        """
        choices = {prepared.threads for prepared in self._prepared.values()}
        prepared = sorted(self._prepared.items())
        text = ", ".join(f"{p.threads} on {self._agents[node].name}" for node, p in prepared)
        text = text if len(choices) > 1 else prepared[0][1].threads
        if self._job.elastic is None or self._job.expendable:  # ranks with roles differ anyway
            return "", text
        numbers = {choice.partition(" ")[0] for choice in choices}
        least = min(numbers, key=lambda number: int(number.partition(",")[0]))
        return least, text if len(numbers) == 1 else f"{least} (the least of {text})"


def _key(secret: Secret) -> bytes:
    """Return the bytes of the secret; only for the stdin of an agent."""
    fd = secret.to_fd()
    try:
        return os.pread(fd, SECRET_BYTES, 0)
    finally:
        os.close(fd)
