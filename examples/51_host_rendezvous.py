"""Run the rendezvous of a job's hosts by hand: messages of agents in, instructions out.

braid run -n 1 examples/51_host_rendezvous.py
"""

from __future__ import annotations

import random

import braid
from braid.launch.cluster.agent_messages import AgentHello, HostAddresses, Prepared
from braid.launch.cluster.host_rendezvous_state import (
    Greet,
    HostRendezvousPhase,
    HostRendezvousState,
    Instruction,
    PrepareHost,
    ProbeTargets,
)
from braid.launch.cluster.reachability import LAUNCHER, Attempt, Endpoint

NAMES = {LAUNCHER: "launcher", 0: "a", 1: "b", 2: "c"}


def addresses(node: int) -> HostAddresses:
    """Return the addresses of a host: a container bridge, the same on every host, and eth0."""
    bridge = Endpoint(node, "docker0", "172.17.0.1", 16, 5000 + node)
    network = Endpoint(node, "eth0", f"10.0.0.{node + 2}", 24, 5000 + node)
    return HostAddresses(f"machine {node}", (bridge, network))


def attempts(probe: ProbeTargets, cut: set[tuple[int, int]]) -> tuple[Attempt, ...]:
    """Return the result of a host's attempts to connect to the addresses of the other hosts."""
    tried = []
    for end in probe.targets:
        why = "another host answers at this address" if end.interface == "docker0" else ""
        why = "timed out" if (probe.node, end.node) in cut and not why else why
        tried.append(Attempt(probe.node, end.node, end.ip, why))
    return tuple(tried)


def gather(cut: set[tuple[int, int]], seed: int, show: bool = False) -> HostRendezvousState:
    """Run the state machine with messages of agents in an order that the seed chooses."""
    state = HostRendezvousState(
        {node: name for node, name in NAMES.items() if node != LAUNCHER}, 3,
        own_addresses=addresses(LAUNCHER), version=braid.__version__,
        limit_s=60, now_ns=0,
    )  # fmt: skip
    hellos = [(n, AgentHello(braid.__version__, NAMES[n], 800 + n)) for n in range(3)]
    waiting: list[tuple[int, object]] = [*hellos]
    order = random.Random(seed)
    while waiting:
        node, message = waiting.pop(order.randrange(len(waiting)))
        before, out = state.phase, list[Instruction]()
        if isinstance(message, AgentHello):
            out = state.on_hello(node, message, now_ns=0)
        elif isinstance(message, Greet):
            out = state.on_addresses(node, addresses(node), now_ns=0)
        elif isinstance(message, ProbeTargets):
            out = state.on_probe_result(node, attempts(message, cut), now_ns=0)
        elif isinstance(message, PrepareHost):
            out = state.on_prepared(node, Prepared(port=29500 if node == 0 else 0))
        waiting += [(instruction.node, instruction) for instruction in out]
        if show:
            answer = {
                "Greet": "HostAddresses",
                "ProbeTargets": "ProbeResult",
                "PrepareHost": "Prepared",
            }
            kind = answer.get(type(message).__name__, type(message).__name__)
            effect = f" -> {len(out)} x {type(out[0]).__name__}" if out else ""
            print(f"{before.name:9} {NAMES[node]:>8}: {kind}{effect}")
    return state


first = gather(set(), seed=1, show=True)
print(f"{first.phase.name}: {[first.reach.addresses[node] for node in range(3)]}")
assert all(gather(set(), seed).reach == first.reach for seed in range(100))
failed = gather({(1, 2), (2, 1)}, seed=1)
assert failed.phase is HostRendezvousPhase.FAILED
print(f"{failed.phase.name}: {failed.problem}")
print("in 100 orders of messages every host gets the same address, bit by bit")
