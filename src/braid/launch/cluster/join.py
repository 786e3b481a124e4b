"""Launchers that were started by hand: node 0's opens a join_listener, the others go there and become its agents."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from braid.clock import Clock
from braid.errors import ConfigError, RendezvousError
from braid.launch.cluster.agent import JoinRequest, serve
from braid.launch.cluster.agent_messages import AGENT_ROLE, Bye
from braid.launch.cluster.join_listener import JOIN_RUN_ID, JoinListener
from braid.launch.cluster.options import Nodes, node_secret
from braid.launch.cluster.reachability import LAUNCHER, Endpoint, eligible
from braid.launch.process.interfaces import interfaces, machine
from braid.launch.process.job import JobSpec
from braid.rendezvous.file_meeting import FileMeeting
from braid.wire import Address, Identity, Secret, SocketConnection, connect

__all__ = ["INSECURE_WARNING", "join_first_node", "open_join_listener"]

FIRST_LIMIT_S = 5.0  # then the user is told that node 0 cannot be reached yet
INSECURE_WARNING = (
    "--insecure-network: whoever reaches the ports of this job can take part in it and run "
    "programs as you. "
    "Use it on a network of your own only"
)


@contextmanager
def open_join_listener(
    nodes: Nodes, clock: Clock, meeting: FileMeeting | None = None
) -> Iterator[JoinListener]:
    """Listen for the other nodes.

    Args:
        nodes: What the user said.
        clock: Time source.
        meeting: Where to leave the addresses, for a meeting by file.

    Raises:
        ConfigError: The address is not this host's, or in use.
    """
    with ExitStack() as stack:
        if meeting is not None:  # however this ends, the next run may use the file's name
            stack.callback(meeting.remove)
        point = nodes.meeting
        addresses = [str(Address(host=nodes.listen or point.host, port=point.port))]
        if meeting is not None:
            addresses = _own_addresses(nodes)
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
) -> Bye:
    """Go to node 0, and run the ranks of this node for it.

    Args:
        job: What this node's user wants to run.
        nodes: What he said of the nodes.
        clock: Time source.
        notice: Shows a text.
        meeting: Where to find the addresses, for a meeting by file.

    Raises:
        ConfigError: Node 0 cannot be reached, or does not want this node.
    """
    secret = node_secret(nodes)
    node = nodes.meeting.node_rank if meeting is None else meeting.node_rank
    assert node is not None
    if meeting is None:
        _check_name(nodes.meeting.host)
        addresses = [nodes.meeting.address]
    else:
        theirs, *found = meeting.find(nodes.join_limit_s)
        addresses = found
        if theirs != machine():  # loopback leads to oneself
            addresses = [a for a in found if not Address.parse(a).is_loopback]
        if not addresses:
            msg = (
                f"expected an address of node 0 in {nodes.meeting.path} that leads there from "
                f"node {node}, found "
                f"{', '.join(found) or 'none'}: see that node 0 is in a network, and is told of "
                "it by --network-interface if at all"
            )
            raise ConfigError(msg)
    link = _dial(addresses, secret, node, nodes.join_limit_s, notice)
    join_request = JoinRequest(node, nodes.meeting.num_nodes, nodes.slots, job.command, secret)
    notice(f"node {node} has joined node 0, which shows the output of all ranks")
    return serve(link, join_request=join_request, clock=clock, notice=notice)


def _dial(
    addresses: list[str],
    secret: Secret,
    node: int,
    limit_s: float,
    notice: Callable[[str], None],
) -> SocketConnection:
    """Connect to node 0 at the first address that leads there."""
    who = Identity(JOIN_RUN_ID, AGENT_ROLE, node)
    first_s = min(FIRST_LIMIT_S, limit_s / 2)
    problems: dict[str, str] = {}
    found = ""
    for share_s in (first_s, limit_s - first_s):
        for address in addresses:
            try:
                return connect(address, secret, who, timeout_s=share_s / len(addresses))
            except RendezvousError as exc:
                if exc.__cause__ is None:  # somebody answered, and does not trust us
                    msg = f"node {node} was turned away at {address}: {exc}"
                    raise ConfigError(msg) from exc
                problems[address] = getattr(exc.__cause__, "strerror", None) or "timed out"
        before, found = found, "; ".join(f"{a}: {why.lower()}" for a, why in problems.items())
        if not before:
            notice(f"node {node} cannot reach node 0 yet ({found}), trying for {limit_s:g} s")
    msg = (
        f"expected to reach the launcher of node 0 from node {node} within {limit_s:g} s, found "
        f"{found}: "
        "is it running, has it ended, and is its port open?"
    )
    raise ConfigError(msg)


def _check_name(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except OSError as exc:
        msg = (
            f"expected the host of node 0, found that the name {host!r} is not resolvable: "
            f"{exc.strerror}"
        )
        raise ConfigError(msg) from exc


def _own_addresses(nodes: Nodes) -> list[str]:
    """All addresses of this host that may be used, loopback too: nodes may share a host."""
    own = [Endpoint(LAUNCHER, i.name, i.ip, i.prefix, 0) for i in interfaces()]
    found = eligible(own, nodes.interfaces, one_machine=True)
    if not found:
        msg = f"expected an address on {', '.join(nodes.interfaces)}, found none on this host"
        raise ConfigError(msg)
    return [str(Address(host=e.ip)) for e in sorted(found, key=lambda e: e.is_loopback)]
