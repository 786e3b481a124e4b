"""Who can reach whom, and at which address each host shall listen: a pure function of what all of them have tried.

Problem: a machine has many addresses (loopback, containers' bridges, tunnels, a second network for
storage), and a job that picks the wrong one hangs in its first collective until a time-out that
names no host. Guessing from routing tables or interface names fails on the next cluster, because
every host has a 172.17.0.1 of its own.

Idea: every host tries to reach every address of every other one and proves there who it is. What
remains is a choice among facts: first a network that all share, then any address that all others
can reach; else a table of hosts by hosts that says why not.

Source: Horovod's driver and task services (horovod/runner/driver), which intersect the names of
interfaces.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from braid.diagnose import reach_table

__all__ = ["LAUNCHER", "Attempt", "Endpoint", "Reachability", "decide", "eligible", "matrix_text"]

LAUNCHER = -1  # number of the launcher among the hosts
# the more a reason says about the way that should work, the earlier
TELLING = ("another host", "refused", "no route", "timed out", "name not resolvable")


class Endpoint(NamedTuple):
    """A port of a host, at which it waits to be found.

    Attributes:
        node: Number of the host; `LAUNCHER` for the launcher.
        interface: Name of the interface.
        ip: Address.
        prefix: Bits of the address that are those of its network.
        port: Port.
    """

    node: int
    interface: str
    ip: str
    prefix: int
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether no other host can reach it."""
        return ipaddress.ip_address(self.ip).is_loopback

    @property
    def network(self) -> str:
        """Its network, as `10.0.0.0/24`."""
        return str(ipaddress.ip_interface(f"{self.ip}/{self.prefix}").network)


class Attempt(NamedTuple):
    """What came of an attempt.

    Attributes:
        source: Number of the host that tried.
        target: Number of the host that it tried to reach.
        ip: Address that it tried.
        reason: Why it could not; empty when it could.
    """

    source: int
    target: int
    ip: str
    reason: str = ""


class Reachability(NamedTuple):
    """What follows from all attempts.

    Attributes:
        addresses: Where each host shall listen; empty when there is a problem.
        interfaces: Names of their interfaces.
        problem: Why there are no addresses; the first line says it in a sentence.
    """

    addresses: Mapping[int, str]
    interfaces: Mapping[int, str]
    problem: str = ""


def eligible(
    endpoints: Sequence[Endpoint], wanted: Collection[str], *, one_machine: bool
) -> list[Endpoint]:
    """Those that may be used at all.

    Args:
        endpoints: All of all hosts.
        wanted: Names of interfaces or networks such as `10.0.0.0/8`; empty for any.
        one_machine: Whether all hosts are the same machine, so that loopback addresses lead
            somewhere.
    """
    found = [e for e in endpoints if _is_wanted(e, wanted)]
    if one_machine:  # loopback first: it is always there and nobody else can reach it
        return sorted(found, key=lambda e: not e.is_loopback)
    return [e for e in found if not e.is_loopback]


def decide(
    names: Mapping[int, str], endpoints: Sequence[Endpoint], attempts: Sequence[Attempt]
) -> Reachability:
    """Choose an address for each host, or say why there is none.

    Args:
        names: Names of all hosts, by number.
        endpoints: Where they waited to be found, the preferred ones first.
        attempts: What came of trying.
    """
    reached: dict[tuple[int, str], set[int]] = {}
    for attempt in attempts:
        if not attempt.reason:
            reached.setdefault((attempt.target, attempt.ip), set()).add(attempt.source)
    by_all: dict[int, list[Endpoint]] = {
        node: [
            e
            for e in endpoints
            if e.node == node and reached.get((node, e.ip), set()) >= set(names) - {node}
        ]
        for node in names
    }
    if not all(by_all.values()):
        return Reachability({}, {}, _problem(names, endpoints, attempts, by_all))
    chosen = _in_shared_network(by_all) or {node: found[0] for node, found in by_all.items()}
    return Reachability(
        {node: e.ip for node, e in chosen.items()},
        {node: e.interface for node, e in chosen.items()},
    )


def matrix_text(
    names: Mapping[int, str], endpoints: Sequence[Endpoint], attempts: Sequence[Attempt]
) -> str:
    """The table of hosts by hosts: a row tries, a column is tried."""
    failed = {
        (row, column): cell
        for row, source in enumerate(names)
        for column, target in enumerate(names)
        if (cell := _cell(source, target, endpoints, attempts)) not in {"ok", "-"}
    }
    return reach_table(list(names.values()), failed)


def _is_wanted(endpoint: Endpoint, wanted: Collection[str]) -> bool:
    if not wanted:
        return True
    ip = ipaddress.ip_address(endpoint.ip)
    for item in wanted:
        if item == endpoint.interface:
            return True
        if "/" in item or item == endpoint.ip:
            try:
                if ip in ipaddress.ip_network(item, strict=False):
                    return True
            except ValueError:  # an interface whose name has a slash
                continue
    return False


def _in_shared_network(by_all: Mapping[int, Sequence[Endpoint]]) -> dict[int, Endpoint] | None:
    first = next(iter(by_all.values()))
    for network in dict.fromkeys(e.network for e in first):
        found = {
            node: next((e for e in usable if e.network == network), None)
            for node, usable in by_all.items()
        }
        chosen = {node: e for node, e in found.items() if e is not None}
        if len(chosen) == len(by_all):
            return chosen
    return None


def _problem(
    names: Mapping[int, str],
    endpoints: Sequence[Endpoint],
    attempts: Sequence[Attempt],
    by_all: Mapping[int, Sequence[Endpoint]],
) -> str:
    hidden = [node for node, usable in by_all.items() if not usable]
    blind = {
        node: [names[s] for s in names if s != node and _cell(s, node, endpoints, attempts) != "ok"]
        for node in hidden
    }
    lines = []
    for node in hidden:
        if blind[node]:
            lines.append(f"{names[node]} cannot be reached from {', '.join(blind[node])}")
        else:
            seen = [
                f"{a.ip} from {names[a.source]}"
                for a in attempts
                if a.target == node and not a.reason
            ]
            lines.append(
                f"{names[node]} has no address that all others can reach: it is found at "
                f"{', '.join(seen)}"
            )
    has = {
        node: [f"{e.interface} {e.ip}/{e.prefix}" for e in endpoints if e.node == node]
        for node in names
    }
    listed = "\n".join(f"  {names[n]:<12} {', '.join(e) or 'no address'}" for n, e in has.items())
    return (
        f"expected hosts that can reach each other, found that {'; '.join(lines)}\n"
        f"{matrix_text(names, endpoints, attempts)}\n{listed}\n"
        "open the ports between them, or name the network they share with --network-interface"
    )


def _cell(
    source: int, target: int, endpoints: Sequence[Endpoint], attempts: Sequence[Attempt]
) -> str:
    if source == target:
        return "-"
    reasons = [a.reason for a in attempts if (a.source, a.target) == (source, target)]
    if "" in reasons:
        return "ok"
    if not any(e.node == target for e in endpoints):
        return "no address"
    for words in TELLING:
        for reason in reasons:
            if reason.startswith(words):
                return reason
    return reasons[0] if reasons else "not tried"
