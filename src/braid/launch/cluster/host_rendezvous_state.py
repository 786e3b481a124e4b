"""Gathering the hosts of a job, as a state machine: what agents say in, what to tell them out.

Problem: a job over several hosts can fail to start in a dozen ways, most of which show as silence.
Idea: one table of what is known of each host; the job starts when nothing is missing, and what is
missing is said once, for all hosts, by name.

    phase       event                          instructions                          next
    GATHERING   an agent is ready              Greet it                              GATHERING
    GATHERING   all have said where they are   Probe: all try to reach each other     PROBING
    PROBING     all have tried                 PrepareHost, with an address each       PREPARING
    PREPARING   all are prepared               -                                     READY
    any         nothing more can come          -                                     FAILED
    any         deadline                       -                                     FAILED

In GATHERING a host that cannot take part does not end the wait for the others: their problems are
reported as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import NamedTuple, TypeAlias

from braid.launch.cluster.agent_messages import AgentHello, HostAddresses, Prepared
from braid.launch.cluster.reachability import (
    LAUNCHER,
    Attempt,
    Endpoint,
    Reachability,
    decide,
    eligible,
)

__all__ = [
    "Greet",
    "HostRendezvousLimits",
    "HostRendezvousPhase",
    "HostRendezvousState",
    "PrepareHost",
    "Probe",
]


class HostRendezvousPhase(Enum):
    """How far it has come."""

    GATHERING = "gathering"
    PROBING = "probing"
    PREPARING = "preparing"
    READY = "ready"
    FAILED = "failed"


class HostRendezvousLimits(NamedTuple):
    """Durations, in nanoseconds."""

    gather_ns: int
    probe_ns: int = 8_000_000_000
    prepare_ns: int = 30_000_000_000


class Greet(NamedTuple):
    """Greet the agent of `node`."""

    node: int


class Probe(NamedTuple):
    """Have `node` try to reach `targets`; the launcher is a node as well."""

    node: int
    targets: tuple[Endpoint, ...]


class PrepareHost(NamedTuple):
    """Have `node` prepare to listen on `address`."""

    node: int
    address: str


Instruction: TypeAlias = Greet | Probe | PrepareHost


class HostRendezvousState:
    """Decides when a job over several hosts can start.

    Args:
        names: Names of the hosts, by number, as far as they are known; the others are called `node
        2`.
        num_nodes: How many hosts there shall be.
        here: The launcher's own place.
        version: The launcher's braid.
        wanted: Interfaces or networks to restrict the choice to; empty for any.
        limits: How long everything may take.
        now_ns: Now.

    Attributes:
        phase: How far it has come.
        reach: Addresses of all hosts, once they are known.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        num_nodes: int,
        *,
        own_addresses: HostAddresses,
        version: str,
        wanted: Collection[str] = (),
        limits: HostRendezvousLimits,
        now_ns: int,
    ) -> None:
        self.phase = HostRendezvousPhase.GATHERING
        self.reach = Reachability({}, {})
        self._names = {LAUNCHER: "launcher", **names}
        self._nodes = range(num_nodes)
        self._version = version
        self._wanted = tuple(wanted)
        self._limits = limits
        self.deadline_ns = now_ns + limits.gather_ns
        self._gather_s = limits.gather_ns / 1e9
        self._ready: dict[int, AgentHello] = {}
        self._here: dict[int, HostAddresses] = {LAUNCHER: own_addresses}
        self._attempts: dict[int, tuple[Attempt, ...]] = {}
        self._prepared: dict[int, Prepared] = {}
        self._problems: dict[int, str] = {}
        self._text = ""

    def name(self, node: int) -> str:
        """What to call a host."""
        return self._names.get(node, f"node {node}")

    @property
    def missing(self) -> list[int]:
        """Hosts that have not come."""
        return [node for node in self._nodes if node not in self._ready]

    @property
    def problem(self) -> str:
        """Why the job cannot start; empty unless FAILED."""
        return self._text

    @property
    def shared_machines(self) -> list[list[str]]:
        """Hosts that are the same machine under several names, whose ranks will share its devices."""
        by_machine: dict[str, list[str]] = {}
        for node in sorted(set(self._here) - {LAUNCHER}):
            by_machine.setdefault(self._here[node].machine, []).append(self.name(node))
        return [names for names in by_machine.values() if len(names) > 1]

    def hello_of(self, node: int) -> AgentHello | None:
        """Who is `node` already; None when nobody is."""
        return self._ready.get(node)

    def on_hello(
        self, node: int, said: AgentHello, now_ns: int, name: str = ""
    ) -> list[Instruction]:
        """An agent has come; `name` is what to call its host from now on."""
        self._ready[node] = said
        self._names[node] = name or self._names.get(node, said.hostname)
        if said.version != self._version:
            problem = f"has braid {said.version}, expected {self._version}: install the same braid"
            return self.on_lost(node, problem, now_ns)
        return [Greet(node)]

    def forget(self, node: int) -> None:
        """An agent has gone, and may come again."""
        for known in (self._ready, self._here, self._problems):
            known.pop(node, None)

    def on_addresses(self, node: int, said: HostAddresses, now_ns: int) -> list[Instruction]:
        """An agent says where it is."""
        self._here[node] = said
        if said.problem:
            self._problems.setdefault(node, said.problem)
        return self._gathered(now_ns)

    def on_probe_result(
        self, node: int, attempts: tuple[Attempt, ...], now_ns: int
    ) -> list[Instruction]:
        """A host has tried to reach the others."""
        self._attempts[node] = attempts
        return self._probed(now_ns)

    def on_prepared(self, node: int, said: Prepared) -> list[Instruction]:
        """A host is ready for ranks, or says why not."""
        self._prepared[node] = said
        if said.problem:
            self._problems[node] = said.problem
        if len(self._prepared) == len(self._nodes):
            if self._problems:
                self._fail()
            else:
                self.phase = HostRendezvousPhase.READY
        return []

    def on_lost(self, node: int, reason: str, now_ns: int) -> list[Instruction]:
        """A host cannot take part."""
        self._problems.setdefault(node, reason)
        if self.phase is HostRendezvousPhase.GATHERING:
            return self._gathered(now_ns)
        self._fail()
        return []

    def tick(self, now_ns: int) -> list[Instruction]:
        """Time has passed."""
        if now_ns < self.deadline_ns or self.phase in {
            HostRendezvousPhase.READY,
            HostRendezvousPhase.FAILED,
        }:
            return []
        if self.phase is HostRendezvousPhase.PROBING:  # who has not answered has reached nobody
            for node in set(self._here) - set(self._attempts):
                self._attempts[node] = ()
            return self._probed(now_ns)
        answered = self._here if self.phase is HostRendezvousPhase.GATHERING else self._prepared
        for node in self._nodes:
            if node not in answered:
                came = "did not answer" if node in self._ready else "did not come"
                self._problems.setdefault(node, f"{came} within {self._gather_s:g} s")
        self._fail()
        return []

    def _gathered(self, now_ns: int) -> list[Instruction]:
        if any(node not in self._here and node not in self._problems for node in self._nodes):
            return []
        if self._problems:
            self._fail()
            return []
        one_machine = len({here.machine for here in self._here.values()}) == 1
        everything = [e for node in sorted(self._here) for e in self._here[node].endpoints]
        self._endpoints = eligible(everything, self._wanted, one_machine=one_machine)
        for node in self._here:
            if not any(e.node == node for e in self._endpoints):
                listed = ", ".join(f"{e.interface} {e.ip}" for e in self._here[node].endpoints)
                asked = f" on {', '.join(self._wanted)}" if self._wanted else " but loopback"
                self._problems[node] = f"has no address{asked}, found {listed or 'none'}"
        if self._problems:
            self._fail()
            return []
        self.phase, self.deadline_ns = HostRendezvousPhase.PROBING, now_ns + self._limits.probe_ns
        return [
            Probe(node, tuple(e for e in self._endpoints if e.node != node)) for node in self._here
        ]

    def _probed(self, now_ns: int) -> list[Instruction]:
        if len(self._attempts) < len(self._here):
            return []
        attempts = [attempt for node in self._attempts for attempt in self._attempts[node]]
        names = {node: self.name(node) for node in sorted(self._here)}
        self.reach = decide(names, self._endpoints, attempts)
        if self.reach.problem:
            self.phase, self._text = HostRendezvousPhase.FAILED, self.reach.problem
            return []
        self.phase, self.deadline_ns = (
            HostRendezvousPhase.PREPARING,
            now_ns + self._limits.prepare_ns,
        )
        return [PrepareHost(node, self.reach.addresses[node]) for node in self._nodes]

    def _fail(self) -> None:
        self.phase = HostRendezvousPhase.FAILED
        said = [f"{self._title(node)} {why}" for node, why in sorted(self._problems.items())]
        came = [self.name(node) for node in self._nodes if node not in self._problems]
        if came:
            said.append(f"nothing is wrong with {', '.join(came)}")
        self._text = "the job cannot start on all of its hosts:\n" + "\n".join(said)

    def _title(self, node: int) -> str:
        if node == LAUNCHER:
            return "this host"
        return f"host {self._names[node]}" if node in self._names else f"node {node}"
