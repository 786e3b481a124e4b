"""Chooses the address on which each host listens, from the results of all probes.

Problem: a machine has many addresses (loopback, container bridges, tunnels, a storage network). A
job that chooses the wrong one hangs in its first collective, until a time-out that names no host.
Guesses from routing tables or interface names fail, because every host has its own 172.17.0.1.

Idea: every host tries to reach every address of every other host and proves its identity there.
Prefer a network that all hosts share, then any address that all other hosts can reach. If there is
none, print a table of hosts by hosts with the reasons.

Source: Horovod's driver and task services (horovod/runner/driver), which intersect the names of
interfaces.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from braid.runtime.diagnose.reach_table import reach_table

__all__ = [
    "LAUNCHER",
    "Attempt",
    "Endpoint",
    "Reachability",
    "decide",
    "eligible",
    "matrix_text",
    "without_unreachable",
]

LAUNCHER = -1  # number of the launcher among the hosts
# reasons for the table, the most informative first
BY_INFORMATION = ("another host", "refused", "no route", "timed out", "name not resolvable")


class Endpoint(NamedTuple):
    """An address and port on which a host listens for probes.

    Attributes:
        node: Number of the host; `LAUNCHER` for the launcher.
        interface: Name of the interface.
        ip: IP address.
        prefix: Number of leading bits that identify the network.
        port: Number of the port.
    """

    node: int
    interface: str
    ip: str
    prefix: int
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only processes on the same host can reach the address."""
        return ipaddress.ip_address(self.ip).is_loopback

    @property
    def network(self) -> str:
        """Network of the address, such as `10.0.0.0/24`."""
        return str(ipaddress.ip_interface(f"{self.ip}/{self.prefix}").network)


class Attempt(NamedTuple):
    """Result of one host's attempt to reach an address of another host.

    Attributes:
        source: Number of the host that tried to connect.
        target: Number of the host to which the address belongs.
        ip: Address that was tried.
        reason: Reason of the failure; empty after success.
    """

    source: int
    target: int
    ip: str
    reason: str = ""


class Reachability(NamedTuple):
    """Addresses that the probes have shown to work.

    Attributes:
        addresses: Address on which each host listens; empty if there is a problem.
        interfaces: Names of the interfaces with these addresses.
        problem: Reason why there are no addresses; the first line is a sentence.
    """

    addresses: Mapping[int, str]
    interfaces: Mapping[int, str]
    problem: str = ""


def eligible(
    endpoints: Sequence[Endpoint], wanted: Collection[str], *, one_machine: bool
) -> list[Endpoint]:
    """Return the endpoints that a job may use.

    Args:
        endpoints: All endpoints of all hosts.
        wanted: Names of interfaces or networks such as `10.0.0.0/8`; empty for any.
        one_machine: Whether all hosts are the same machine, so that loopback addresses work.
    """
    usable = [e for e in endpoints if _is_wanted(e, wanted)]
    if one_machine:  # loopback first: it always exists and no other host can reach it
        return sorted(usable, key=lambda e: not e.is_loopback)
    return [e for e in usable if not e.is_loopback]


def decide(
    names: Mapping[int, str], endpoints: Sequence[Endpoint], attempts: Sequence[Attempt]
) -> Reachability:
    """Choose an address for each host, or explain why there is none.

    Args:
        names: Names of all hosts, by number.
        endpoints: Endpoints of all hosts, in order of preference.
        attempts: Results of all probes.
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
    chosen = _in_shared_network(by_all) or {node: usable[0] for node, usable in by_all.items()}
    return Reachability(
        {node: e.ip for node, e in chosen.items()},
        {node: e.interface for node, e in chosen.items()},
    )


def without_unreachable(
    names: Mapping[int, str], endpoints: Sequence[Endpoint], attempts: Sequence[Attempt]
) -> dict[int, str]:
    """Return hosts without which all other hosts reach each other, with clauses on why.

    Of the remaining hosts, the host with the most failed connections to others is left out first,
    and of several such hosts the one with the largest number. The launcher is never left out.

    Args:
        names: See `decide`.
        endpoints: See `decide`.
        attempts: See `decide`.
    """
    clauses: dict[int, str] = {}
    remaining = dict(names)
    while decide(remaining, endpoints, attempts).problem and set(remaining) != {LAUNCHER}:
        failed = {
            node: [
                peer
                for peer in remaining
                if peer != node
                and {"ok"}
                != {_cell(a, b, endpoints, attempts) for a, b in ((node, peer), (peer, node))}
            ]
            for node in remaining
            if node != LAUNCHER
        }
        worst = max(failed, key=lambda node: (len(failed[node]), node))
        peers = ", ".join(names[peer] for peer in failed[worst])
        clauses[worst] = (
            f"has no connection with {peers}"
            if peers
            else "has no address that all other hosts can reach"
        )
        del remaining[worst]
    return clauses


def matrix_text(
    names: Mapping[int, str], endpoints: Sequence[Endpoint], attempts: Sequence[Attempt]
) -> str:
    """Return a table of hosts by hosts: the host of a row tries to reach the host of a column."""
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
            except ValueError:  # an interface with a slash in its name
                continue
    return False


def _in_shared_network(by_all: Mapping[int, Sequence[Endpoint]]) -> dict[int, Endpoint] | None:
    first = next(iter(by_all.values()))
    for network in dict.fromkeys(e.network for e in first):
        chosen = {
            node: e
            for node, usable in by_all.items()
            if (e := next((e for e in usable if e.network == network), None)) is not None
        }
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
            reached_at = [
                f"{a.ip} from {names[a.source]}"
                for a in attempts
                if a.target == node and not a.reason
            ]
            lines.append(
                f"{names[node]} has no address that all other hosts can reach: it is reached at "
                f"{', '.join(reached_at)}"
            )
    has = {
        node: [f"{e.interface} {e.ip}/{e.prefix}" for e in endpoints if e.node == node]
        for node in names
    }
    listed = "\n".join(f"  {names[n]:<12} {', '.join(e) or 'no address'}" for n, e in has.items())
    return (
        f"hosts cannot reach each other: {'; '.join(lines)}\n"
        f"{matrix_text(names, endpoints, attempts)}\n{listed}\n"
        "open the ports between the hosts, or name their shared network with --network-interface"
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
    for begin in BY_INFORMATION:
        for reason in reasons:
            if reason.startswith(begin):
                return reason
    return reasons[0] if reasons else "not tried"
