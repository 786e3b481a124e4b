"""State machine that gathers the hosts of a job: messages of agents in, instructions out.

Problem: a job over several hosts can fail to start in a dozen ways, and most of them look like a
hang.

Idea: keep one table with the state of each host. The job starts when the table is complete; else
one message names all hosts with problems.

    phase       event                           instructions               next
    GATHERING   an agent sends hello            Greet                      GATHERING
    GATHERING   the addresses of all are known  ProbeTargets, for each     PROBING
    PROBING     all have sent their results     PrepareHost, for each      PREPARING
    PREPARING   all are prepared                -                          READY
    any         no host is outstanding, but     -                          FAILED
                some have problems
    any         deadline                        -                          FAILED

In GATHERING, a host that cannot take part does not end the wait for other hosts, so that their
problems are reported too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from braid.launch.cluster.agent_messages import AgentHello, HostAddresses, Prepared
from braid.launch.cluster.reachability import (
    LAUNCHER,
    Attempt,
    Endpoint,
    Reachability,
    decide,
    eligible,
    without_unreachable,
)

__all__ = [
    "Greet",
    "HostRendezvousPhase",
    "HostRendezvousState",
    "PrepareHost",
    "ProbeTargets",
    "RunningHost",
]

# time limits of phases
PROBE_NS = 8_000_000_000
PREPARE_NS = 30_000_000_000


class HostRendezvousPhase(Enum):
    """Phase of the rendezvous."""

    GATHERING = "gathering"
    PROBING = "probing"
    PREPARING = "preparing"
    READY = "ready"
    FAILED = "failed"


class Greet(NamedTuple):
    """Send a greeting to the agent of `node`."""

    node: int


class ProbeTargets(NamedTuple):
    """Ask `node` (the number of an agent, or of the launcher) to connect to `targets`."""

    node: int
    targets: tuple[Endpoint, ...]


class PrepareHost(NamedTuple):
    """Ask `node` to prepare for ranks that listen on `address`."""

    node: int
    address: str


class RunningHost(NamedTuple):
    """A host on which ranks already run: its name, and the endpoint that others must reach."""

    name: str
    endpoint: Endpoint


Instruction: TypeAlias = Greet | ProbeTargets | PrepareHost


class HostRendezvousState:
    """Decides when a job over several hosts can start.

    Args:
        names: Names of the hosts, by number, as far as known; a host without name is `node 2`.
        num_nodes: Number of hosts.
        own_addresses: Addresses of the launcher.
        version: Version of the launcher's braid.
        wanted: Interfaces or networks to which addresses are restricted; empty for any.
        first_node: Number of the first host.
        may_grow: Whether further hosts may come later, which cannot reach loopback addresses.
        limit_s: Seconds until all hosts must have come.
        now_ns: Current time.

    Attributes:
        phase: Phase of the rendezvous.
        reach: Chosen addresses of all hosts; empty until PREPARING.
        deadline_ns: Time at which the current phase ends.
        peers: Hosts of the run that these hosts join, by number; hosts may leave meanwhile.
    """

    peers: Mapping[int, RunningHost] = MappingProxyType({})

    def __init__(
        self,
        names: Mapping[int, str],
        num_nodes: int,
        *,
        own_addresses: HostAddresses,
        version: str,
        wanted: Collection[str] = (),
        first_node: int = 0,
        may_grow: bool = False,
        limit_s: float,
        now_ns: int,
    ) -> None:
        self.phase = HostRendezvousPhase.GATHERING
        self.reach = Reachability({}, {})
        self._names = {LAUNCHER: "launcher", **names}
        self._nodes = range(first_node, first_node + num_nodes)
        self._version = version
        self._wanted = tuple(wanted)
        self._may_grow = may_grow
        self.deadline_ns = now_ns + round(limit_s * 1e9)
        self._gather_s = limit_s
        self._ready: dict[int, AgentHello] = {}
        self._addresses: dict[int, HostAddresses] = {LAUNCHER: own_addresses}
        self._attempts: dict[int, tuple[Attempt, ...]] = {}
        self._prepared: dict[int, Prepared] = {}
        self._problems: dict[int, str] = {}
        self._text = ""

    def name(self, node: int) -> str:
        """Return the name of a host for messages."""
        return self._names.get(node, f"node {node}")

    @property
    def missing(self) -> list[int]:
        """Numbers of the hosts without a hello message from their agent."""
        return [node for node in self._nodes if node not in self._ready]

    @property
    def problem(self) -> str:
        """Reason why the job cannot start; empty unless FAILED."""
        return self._text

    @property
    def endpoints(self) -> Mapping[int, Endpoint]:
        """Endpoint that answers probes at the chosen address of each host, without the launcher."""
        return {
            endpoint.node: endpoint
            for endpoint in self._endpoints
            if endpoint.ip == self.reach.addresses[endpoint.node] and endpoint.node != LAUNCHER
        }

    @property
    def problems(self) -> Mapping[int, str]:
        """Clauses such as `has no agent` about the hosts that cannot take part, by number."""
        return self._problems

    @property
    def shared_machines(self) -> list[list[str]]:
        """Groups of host names that mean the same machine; their ranks will share its devices."""
        by_machine: dict[str, list[str]] = {}
        for node in sorted(set(self._addresses) - {LAUNCHER}):
            by_machine.setdefault(self._addresses[node].machine, []).append(self.name(node))
        return [names for names in by_machine.values() if len(names) > 1]

    def hello_of(self, node: int) -> AgentHello | None:
        """Return the hello message of the agent of `node`; None if it has not come."""
        return self._ready.get(node)

    def on_hello(
        self, node: int, hello: AgentHello, now_ns: int, name: str = ""
    ) -> list[Instruction]:
        """Process the hello message of an agent; return the instructions that follow.

        `name` replaces the name of its host.
        """
        self._ready[node] = hello
        self._names[node] = name or self._names.get(node, hello.hostname)
        if hello.version != self._version:
            problem = (
                f"has braid {hello.version}, but the launcher has {self._version}: install the "
                "same version"
            )
            return self.on_lost(node, problem, now_ns)
        return [Greet(node)]

    def forget(self, node: int) -> None:
        """Forget an agent that has gone, so that it may join again."""
        for known in (self._ready, self._addresses, self._problems):
            known.pop(node, None)

    def on_addresses(self, node: int, addresses: HostAddresses, now_ns: int) -> list[Instruction]:
        """Process the addresses of a host; return the instructions that follow."""
        self._addresses[node] = addresses
        if addresses.problem:
            self._problems.setdefault(node, addresses.problem)
        return self._gathered(now_ns)

    def on_probe_result(
        self, node: int, attempts: tuple[Attempt, ...], now_ns: int
    ) -> list[Instruction]:
        """Process a host's attempts to reach all other hosts; return the instructions."""
        self._attempts[node] = attempts
        return self._probed(now_ns)

    def on_prepared(self, node: int, prepared: Prepared) -> list[Instruction]:
        """Process a host's answer that it is ready, or why not; return the instructions."""
        self._prepared[node] = prepared
        if prepared.problem:
            self._problems[node] = prepared.problem
        if len(self._prepared) == len(self._nodes):
            if self._problems:
                self._fail()
            else:
                self.phase = HostRendezvousPhase.READY
        return []

    def on_lost(self, node: int, reason: str, now_ns: int) -> list[Instruction]:
        """Process the loss of a host, or why it cannot take part; return the instructions."""
        self._problems.setdefault(node, reason)
        if self.phase is HostRendezvousPhase.GATHERING:
            return self._gathered(now_ns)
        self._fail()
        return []

    def tick(self, now_ns: int) -> list[Instruction]:
        """Advance to time `now_ns`; return the instructions that are due."""
        if now_ns < self.deadline_ns or self.phase in {
            HostRendezvousPhase.READY,
            HostRendezvousPhase.FAILED,
        }:
            return []
        if self.phase is HostRendezvousPhase.PROBING:  # hosts without answer have reached no host
            for node in set(self._addresses) - set(self._attempts):
                self._attempts[node] = ()
            return self._probed(now_ns)
        answered = (
            self._addresses if self.phase is HostRendezvousPhase.GATHERING else self._prepared
        )
        for node in self._nodes:
            if node not in answered:
                missed = "did not answer" if node in self._ready else "did not join"
                self._problems.setdefault(node, f"{missed} within {self._gather_s:g} s")
        self._fail()
        return []

    def _gathered(self, now_ns: int) -> list[Instruction]:
        if any(node not in self._addresses and node not in self._problems for node in self._nodes):
            return []
        if self._problems:
            self._fail()
            return []
        one_machine = len({addresses.machine for addresses in self._addresses.values()}) == 1
        everything = [
            e for node in sorted(self._addresses) for e in self._addresses[node].endpoints
        ]
        self._endpoints = eligible(everything, self._wanted, one_machine=one_machine)
        if self._may_grow:
            self._endpoints.sort(key=lambda endpoint: endpoint.is_loopback)
        for node in self._addresses:
            if not any(e.node == node for e in self._endpoints):
                listed = ", ".join(f"{e.interface} {e.ip}" for e in self._addresses[node].endpoints)
                kind = f" on {', '.join(self._wanted)}" if self._wanted else " but loopback"
                self._problems[node] = f"has no address{kind}; it has {listed or 'none'}"
        if self._problems:
            self._fail()
            return []
        self.phase, self.deadline_ns = HostRendezvousPhase.PROBING, now_ns + PROBE_NS
        peers = [peer.endpoint for peer in self.peers.values()]
        return [
            ProbeTargets(
                node,
                (
                    *(e for e in self._endpoints if e.node != node),
                    *(peers if node != LAUNCHER else ()),
                ),
            )
            for node in self._addresses
        ]

    def _probed(self, now_ns: int) -> list[Instruction]:
        if len(self._attempts) < len(self._addresses):
            return []
        attempts = [attempt for node in self._attempts for attempt in self._attempts[node]]
        names = {node: self.name(node) for node in sorted(self._addresses)}
        self.reach = decide(names, self._endpoints, attempts)
        if self.reach.problem:
            self.phase, self._text = HostRendezvousPhase.FAILED, self.reach.problem
            self._problems = without_unreachable(names, self._endpoints, attempts)
            return []
        self._problems = self._without_peers(attempts)
        if self._problems:
            self._fail()
            return []
        self.phase, self.deadline_ns = HostRendezvousPhase.PREPARING, now_ns + PREPARE_NS
        return [PrepareHost(node, self.reach.addresses[node]) for node in self._nodes]

    def _without_peers(self, attempts: Sequence[Attempt]) -> dict[int, str]:
        """Return the hosts that cannot reach a host of the run that they join, with clauses."""
        failed = {
            node: [
                f"{self.peers[a.target].name} at {a.ip} ({a.reason})"
                for a in attempts
                if a.source == node and a.reason and a.target in self.peers
            ]
            for node in self._nodes
        }
        return {node: f"cannot reach {', '.join(to)}" for node, to in failed.items() if to}

    def _fail(self) -> None:
        self.phase = HostRendezvousPhase.FAILED
        lines = [f"{self._title(node)} {why}" for node, why in sorted(self._problems.items())]
        good = [self.name(node) for node in self._nodes if node not in self._problems]
        if good:
            lines.append(f"nothing is wrong with {', '.join(good)}")
        self._text = "the job cannot start on all of its hosts:\n" + "\n".join(lines)

    def _title(self, node: int) -> str:
        if node == LAUNCHER:
            return "this host"
        return f"host {self._names[node]}" if node in self._names else f"node {node}"
