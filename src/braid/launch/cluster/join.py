"""Launchers that were started by hand: node 0 listens, all other launchers join as its agents."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from braid.errors import ConfigError, RendezvousError
from braid.launch.cluster.agent import JoinRequest, serve
from braid.launch.cluster.agent_messages import AGENT_ROLE, AgentBye
from braid.launch.cluster.join_listener import JOIN_RUN_ID, JoinListener
from braid.launch.cluster.options import Nodes, node_secret
from braid.launch.cluster.reachability import LAUNCHER, Endpoint, eligible
from braid.launch.process.job import JobSpec
from braid.runtime.clock import Clock
from braid.runtime.rendezvous.file_meeting import FileMeeting
from braid.runtime.rendezvous.interfaces import interfaces, machine
from braid.runtime.wire import Address, Connection, Identity, Secret, connect

__all__ = ["INSECURE_WARNING", "dial", "join_first_node", "open_join_listener", "own_addresses"]

FIRST_LIMIT_S = 5.0  # until the first notice that node 0 cannot be reached
INSECURE_WARNING = (
    "--insecure-network: anyone who reaches the ports of this job can join it and run programs "
    "as you. Use it only on a network of your own"
)


@contextmanager
def open_join_listener(
    nodes: Nodes, clock: Clock, meeting: FileMeeting | None = None
) -> Iterator[JoinListener]:
    """Listen for the launchers of all other nodes.

    Args:
        nodes: Options of the user.
        clock: Time source.
        meeting: File in which to publish the addresses; None if the address is an option.

    Raises:
        ConfigError: The address is not one of this host, or is in use.
    """
    with ExitStack() as stack:
        if meeting is not None:  # in any case, so that the next run can use the file's name
            stack.callback(meeting.remove)
        point = nodes.meeting
        addresses = [str(Address(host=nodes.listen or point.host, port=point.port))]
        if meeting is not None:
            addresses = own_addresses(nodes.interfaces)
        join_listener = JoinListener(addresses, node_secret(nodes), clock)
        stack.callback(join_listener.close)
        if meeting is not None:
            meeting.publish([machine(), *join_listener.addresses])
        yield join_listener


def join_first_node(
    job: JobSpec,
    nodes: Nodes,
    clock: Clock,
    notice: Callable[[str], None],
    meeting: FileMeeting | None = None,
) -> AgentBye:
    """Join node 0 as an agent, and run the ranks of this node until the run ends.

    Args:
        job: Job to run; must equal the job of node 0.
        nodes: Options of the user.
        clock: Time source.
        notice: Shows a text to the user.
        meeting: File with the addresses of node 0; None if the address is an option.

    Raises:
        ConfigError: Node 0 cannot be reached, or refuses this node.
    """
    secret = node_secret(nodes)
    node = nodes.meeting.node_rank if meeting is None else meeting.node_rank
    assert node is not None
    if meeting is None:
        _check_name(nodes.meeting.host)
        addresses = [nodes.meeting.address]
    else:
        theirs, *published = meeting.find(nodes.join_limit_s)
        addresses = published
        if theirs != machine():  # loopback leads to this machine
            addresses = [a for a in published if not Address.parse(a).is_loopback]
        if not addresses:
            msg = (
                f"node {node} cannot reach node 0: {nodes.meeting.path} lists "
                f"{', '.join(published) or 'no address'}. Connect node 0 to a network, and check "
                "its --network-interface"
            )
            raise ConfigError(msg)
    link = dial(addresses, secret, node, nodes.join_limit_s, notice)
    join_request = JoinRequest(node, nodes.meeting.num_nodes, nodes.slots, job.command, secret)
    notice(f"node {node} has joined node 0, which shows the output of all ranks")
    return serve(link, join_request=join_request, clock=clock, notice=notice)


def dial(
    addresses: Sequence[str],
    secret: Secret,
    node: int,
    limit_s: float,
    notice: Callable[[str], None],
) -> Connection:
    """Connect a node to the launcher at the first address that works.

    Raises:
        ConfigError: No address works in time, or the launcher refuses the node.
    """
    identity = Identity(JOIN_RUN_ID, AGENT_ROLE, node)
    first_s = min(FIRST_LIMIT_S, limit_s / 2)
    problems: dict[str, str] = {}
    failures = ""
    for share_s in (first_s, limit_s - first_s):
        for address in addresses:
            try:
                return connect(address, secret, identity, timeout_s=share_s / len(addresses))
            except RendezvousError as exc:
                if exc.__cause__ is None:  # a program answered and refused this node
                    msg = f"node {node} was refused at {address}: {exc}"
                    raise ConfigError(msg) from exc
                problems[address] = getattr(exc.__cause__, "strerror", None) or "timed out"
        before, failures = failures, "; ".join(f"{a}: {why.lower()}" for a, why in problems.items())
        if not before:
            notice(
                f"node {node} cannot reach the launcher yet ({failures}), trying for {limit_s:g} s"
            )
    msg = (
        f"node {node} cannot reach the launcher within {limit_s:g} s: {failures}. Check "
        "that it is running and that its port is open"
    )
    raise ConfigError(msg)


def _check_name(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except OSError as exc:
        msg = f"the host name {host!r} of node 0 is not resolvable: {exc.strerror}"
        raise ConfigError(msg) from exc


def own_addresses(wanted: Sequence[str]) -> list[str]:
    """Return all usable addresses of this host, including loopback: nodes may share a host.

    Args:
        wanted: Names of interfaces or networks to which addresses are restricted.

    Raises:
        ConfigError: This host has no usable address.
    """
    endpoints = [Endpoint(LAUNCHER, i.name, i.ip, i.prefix, 0) for i in interfaces()]
    usable = eligible(endpoints, wanted, one_machine=True)
    if not usable:
        msg = f"this host has no address on {', '.join(wanted)}: correct --network-interface"
        raise ConfigError(msg)
    return [str(Address(host=e.ip)) for e in sorted(usable, key=lambda e: e.is_loopback)]
