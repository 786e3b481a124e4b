"""Backend for several hosts: starts ranks through the agents and forwards their reports."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from braid.launch.cluster.agent_handle import AgentHandle
from braid.launch.cluster.agent_messages import (
    FinalRecord,
    Finish,
    Finished,
    NotStarted,
    OpenWaits,
    Output,
    ProcessChanged,
    RankSnapshot,
    RankStarted,
    Signalled,
    StackRequest,
    Start,
)
from braid.launch.cluster.agent_registry import AgentRegistry
from braid.launch.cluster.host_rendezvous_state import RunningHost
from braid.launch.cluster.join_listener import JoinListener
from braid.launch.cluster.options import AgentStarter
from braid.launch.cluster.rank_assignment import RankPlace
from braid.launch.cluster.reachability import LAUNCHER, Endpoint
from braid.launch.cluster.remote_rank import RemoteRank
from braid.launch.supervise.backend import OnChange, OnSignal, RankPlacement, RankSpec
from braid.launch.supervise.rank import Rank
from braid.runtime.clock import Clock
from braid.runtime.diagnose.run_record import RunHost
from braid.runtime.diagnose.verdict import MemoryKill
from braid.runtime.message import Message
from braid.runtime.wire import Address, Secret

__all__ = ["HostsReady", "RemoteBackend"]

FINISH_NS = 10_000_000_000


class HostsReady(NamedTuple):
    """Result of a rendezvous: all hosts are ready for ranks.

    Attributes:
        run_id: Name of the run.
        secret: Secret of the run.
        registry: Registry of the agents.
        agents: Agents of all hosts, by number.
        addresses: Address on which each host and the launcher listen.
        endpoints: Endpoint on which the agent of each host answers probes, if hosts may come later.
        places: Hosts of all ranks.
        master_port: Port that the agent of rank 0's host has reserved.
        num_threads: OMP_NUM_THREADS of all ranks; empty if each host has chosen its own.
        threads: OMP_NUM_THREADS of the ranks, with the reason for the choice.
        listen: Address on which the store listens; empty for the launcher's address in
            `addresses`.
        join_listener: Listener that refuses late launchers; None if the launcher started all
            agents.
        starter: Engine that has started the agents; None without one.
    """

    run_id: str
    secret: Secret
    registry: AgentRegistry
    agents: Mapping[int, AgentHandle]
    addresses: Mapping[int, str]
    endpoints: Mapping[int, Endpoint]
    places: Sequence[RankPlace]
    master_port: int
    num_threads: str
    threads: str
    listen: str
    join_listener: JoinListener | None
    starter: AgentStarter | None = None


class RemoteBackend:
    """Starts ranks through agents, which the caller closes.

    Args:
        hosts_ready: Result of the rendezvous.
        clock: Time source.

    Attributes:
        hosts_ready: Hosts of the run, with the hosts that were added.
    """

    spans_hosts = True

    def __init__(self, hosts_ready: HostsReady, clock: Clock) -> None:
        self.run_id = hosts_ready.run_id
        self.secret = hosts_ready.secret
        self.threads = hosts_ready.threads
        self.hosts_ready = hosts_ready
        self._agents = dict(hosts_ready.agents)
        self._registries = [hosts_ready.registry]
        self._released: set[int] = set()  # nodes with agents that were asked to end
        self._clock = clock
        self._selector: selectors.BaseSelector | None = None
        self._ranks: dict[int, RemoteRank] = {}
        self._by_node: dict[int, list[RemoteRank]] = {node: [] for node in self._agents}
        self._finished: set[int] = set()
        self._leaving: set[int] = set()  # nodes that were asked to end
        self._on_change: OnChange = _ignore
        self._on_signal: OnSignal = _ignore
        self._adopt(hosts_ready.agents)

    def add(self, hosts_ready: HostsReady) -> None:
        """Add hosts on which ranks may start from now on; the caller closes their agents."""
        run = self.hosts_ready
        self._agents |= hosts_ready.agents
        self._by_node |= {node: [] for node in hosts_ready.agents}
        self._registries.append(hosts_ready.registry)
        self.hosts_ready = run._replace(
            agents=self._agents,
            addresses={**hosts_ready.addresses, **run.addresses},
            endpoints={**run.endpoints, **hosts_ready.endpoints},
            places=(*run.places, *hosts_ready.places),
        )
        self._adopt(hosts_ready.agents)
        if self._selector is not None:
            hosts_ready.registry.register(self._selector)

    def has_agent(self, host: str) -> bool:
        """Return whether ranks can start on a host."""
        return self._node_of(host) is not None

    def release(self, kept: Collection[str]) -> list[str]:
        """End idle agents on hosts other than `kept`; return the names of their hosts."""
        released = []
        for node, agent in self._agents.items():
            is_idle = not any(rank.alive for rank in self._by_node[node])
            if is_idle and agent.alive and agent.name not in kept and node not in self._released:
                self._released.add(node)
                agent.end(0, "")
                released.append(agent.name)
        return released

    def _adopt(self, agents: Mapping[int, AgentHandle]) -> None:
        for agent in agents.values():
            agent.on_message, agent.on_lost = self._on_message, self._on_lost

    @property
    def running(self) -> dict[int, RunningHost]:
        """Hosts with a live agent that was not asked to end, by number."""
        unusable = self._released | self._leaving
        return {
            node: RunningHost(agent.name, self.hosts_ready.endpoints[node])
            for node, agent in self._agents.items()
            if agent.alive and node not in unusable
        }

    def _node_of(self, host: str) -> int | None:
        """Return the number of a host with a live agent; None without one."""
        return next((node for node, at in self.running.items() if at.name == host), None)

    @property
    def _nodes(self) -> list[int]:
        """Numbers of all hosts so far by their order; a host that has failed to join has none."""
        return list(dict.fromkeys(place.node for place in self.hosts_ready.places))

    @property
    def is_on_engine(self) -> bool:
        """Whether an engine, such as Slurm, has started the agents."""
        return self.hosts_ready.starter is not None

    @property
    def store_address(self) -> str:
        """Address of the launcher in the network of all hosts, unless the user named another."""
        return str(Address(host=self.hosts_ready.listen or self.hosts_ready.addresses[LAUNCHER]))

    def address_for_rank(self, listening: str) -> str:
        """Return the address at which ranks reach the store that listens at `listening`."""
        port = Address.parse(listening).port
        return str(Address(host=self.hosts_ready.addresses[LAUNCHER], port=port))

    @property
    def hosts(self) -> tuple[RunHost, ...]:
        """Hosts of the ranks, in rank order."""
        sizes = {p.node: p.local_world_size for p in self.hosts_ready.places}
        addresses = self.hosts_ready.addresses
        return tuple(
            RunHost(name=self._agents[node].name, address=addresses[node], num_ranks=size)
            for node, size in sizes.items()
        )

    @property
    def deadline_ns(self) -> int | None:
        """Time at which `poll` is due; None while nothing is due."""
        join_listener = self.hosts_ready.join_listener
        if self._asking() or self._homeless():
            return 0
        return join_listener.deadline_ns if join_listener is not None else None

    def attach(
        self,
        selector: selectors.BaseSelector,
        *,
        on_change: OnChange,
        on_signal: OnSignal,
        notice: Callable[[str], None],
    ) -> None:
        """Report events of the ranks from now on; see `RankBackend.attach`."""
        self._on_change, self._on_signal = on_change, on_signal
        self._selector = selector
        registry, join_listener = self.hosts_ready.registry, self.hosts_ready.join_listener
        registry.register(selector)
        if join_listener is not None:
            join_listener.register(selector, registry, self._refuse_late, notice)
        if self.hosts_ready.starter is not None:
            self.hosts_ready.starter.register(selector)

    def detach(self) -> None:
        """Stop reporting events, and unregister from the selector."""
        self._on_change, self._on_signal = _ignore, _ignore
        self._selector = None
        for registry in self._registries:
            registry.unregister()
        if self.hosts_ready.join_listener is not None:
            self.hosts_ready.join_listener.unregister()
        if self.hosts_ready.starter is not None:
            self.hosts_ready.starter.unregister()

    def placement(self, place: int, host: str = "") -> RankPlacement:
        """Return the placement of a rank; see `RankBackend.placement`.

        A spare, or a rank with a host that is lost or was asked to end, is placed on another living
        host beside that host's ranks.
        """
        places, addresses = self.hosts_ready.places, self.hosts_ready.addresses
        is_lost = [not self._agents[p.node].alive or p.node in self._leaving for p in places]
        node = self._node_of(host)
        if host and node is None:  # lost since then: the rank is lost with it, and replaced
            node = next((n for n, agent in self._agents.items() if agent.name == host), None)
        if node is not None:
            chosen, local_rank = next(p for p in places if p.node == node), place
        elif place < len(places) and not is_lost[place]:
            chosen, local_rank = places[place], places[place].local_rank
        else:
            usable = [p for p, lost in zip(places, is_lost, strict=True) if not lost] or places
            chosen = usable[place % len(usable)]
            num_before = sum(is_lost[:place]) + max(0, place - len(places))
            local_rank = chosen.local_world_size + num_before
        return RankPlacement(
            local_rank=local_rank,
            local_world_size=max(chosen.local_world_size, local_rank + 1),
            node_rank=self._nodes.index(chosen.node),
            num_nodes=len(self._nodes),
            master_addr=addresses[places[0].node],
            master_port=self.hosts_ready.master_port,
            listen=addresses[chosen.node],
        )

    def start(self, spec: RankSpec) -> Rank:
        """Ask the agent of the rank's host to start the rank."""
        agent = self._agents[self._nodes[spec.environment.node_rank]]
        rank = self._ranks[spec.environment.rank] = RemoteRank(spec, agent)
        self._by_node[agent.node].append(rank)
        agent.send(Start(spec.environment, self.hosts_ready.num_threads))
        return rank

    def reap(self) -> None:
        """Do nothing: an agent's loss is detected by its closed connection."""

    def poll(self) -> None:
        """Send the stack requests that are due, and refuse late launchers; end homeless ranks."""
        for node in self._homeless():
            self._on_lost(self._agents[node], "was lost before this rank could start on it")
        for node in self._asking():
            asked = [r for r in self._by_node[node] if r.wants_stacks]
            handlers = tuple(r.rank for r in asked if r.has_joined and r.alive)
            self._agents[node].send(StackRequest(handlers))
            for rank in asked:
                rank.wants_stacks = False
        if self.hosts_ready.join_listener is not None:
            self.hosts_ready.join_listener.poll()

    def memory_kill(self) -> MemoryKill | None:
        """Return None: agents detect out-of-memory kills on their hosts."""
        return None

    def finish(self) -> Iterator[int]:
        """Ask all agents to end the processes that ranks left behind, and wait for the agents.

        Yields:
            Time until which the caller should poll descriptors before the next step.
        """
        deadline_ns = self._clock.now_ns() + FINISH_NS
        for agent in self._agents.values():
            agent.send(Finish())
        while self._clock.now_ns() < deadline_ns:
            if all(not a.alive or a.node in self._finished for a in self._agents.values()):
                return
            yield deadline_ns

    def dismiss(self, exit_code: int, text: str) -> None:
        """Send the outcome of the run to all agents, which then end."""
        for agent in self._agents.values():
            agent.end(exit_code, text)

    def _on_message(
        self, agent: AgentHandle, message: Message, buffers: Sequence[memoryview]
    ) -> None:
        if isinstance(message, Finished):
            self._finished.add(agent.node)
        elif isinstance(message, Signalled):
            self._leaving.add(agent.node)
            self._on_signal(message.signum, agent.name)
        elif isinstance(message, OpenWaits):
            for rank in self._by_node[agent.node]:
                rank.on_open_waits([wait for wait in message.waits if wait.rank == rank.rank])
        elif isinstance(message, RankSnapshot):
            for view in message.views:
                if view.rank in self._ranks:
                    self._ranks[view.rank].on_snapshot(view)
        elif isinstance(message, RankStarted | NotStarted | Output | FinalRecord | ProcessChanged):
            sender = self._ranks.get(message.rank)
            if sender is not None and sender in self._by_node[agent.node] and sender.alive:
                change = sender.on_agent_message(message, buffers)
                if change is not None:
                    self._on_change(sender, change)

    def _on_lost(self, agent: AgentHandle, why: str) -> None:
        for rank in self._by_node[agent.node]:
            if rank.alive:
                self._on_change(rank, rank.on_host_lost(f"host {agent.name} {why}"))

    def _homeless(self) -> list[int]:
        """Return lost hosts with ranks that were to start there, as no other host was left."""
        lost = (node for node, agent in self._agents.items() if not agent.alive)
        return [node for node in lost if any(rank.alive for rank in self._by_node[node])]

    def _asking(self) -> list[int]:
        return [n for n, ranks in self._by_node.items() if any(r.wants_stacks for r in ranks)]

    def _refuse_late(self, agent: AgentHandle) -> str:
        node = agent.hello.node_rank if agent.hello is not None else None
        names = ", ".join(agent.name for agent in self._agents.values())
        return (
            f"node {node} came too late, as the job already runs on {names}: start all nodes again"
        )


def _ignore(*args: object) -> None:
    """Ignore an event before `attach` or after `detach`."""
