"""Addresses and secret of a parameter server's nodes, which connect to each other."""

from __future__ import annotations

import os

from braid.comm import Group
from braid.runtime.rendezvous import wants_frame_codes
from braid.runtime.rendezvous.network import network_of_program
from braid.runtime.transport.meeting import host_name
from braid.runtime.transport.peer_connections import own_address
from braid.runtime.wire import Address, Secret, local_address

__all__ = ["can_be_reached", "connection_secret", "listening_address"]

_LABEL = b"braid parameter server"


def listening_address(group: Group, node: str) -> str:
    """Return an address for a node that the ranks of a group can call; a collective.

    Inside a host it is a unix socket, which passes three times as many bytes as TCP's loopback. On
    several hosts it is this host's address on the network of the job, as for collectives.

    Raises:
        ConfigError: This host has no address on that network.
    """
    if len(set(group.objects.all_gather(host_name()))) == 1:
        return local_address(f"ps-{node}")
    _, network = network_of_program()
    return str(Address(host=network.listen or own_address(network), port=0))


def connection_secret(group: Group) -> Secret:
    """Return the secret of the connections between nodes; a collective.

    Frames between hosts are not encrypted. So random bytes of the first rank are the secret inside
    a host only; over several hosts the ranks derive it from them and the job's secret.
    """
    own, hosts = None, set(group.objects.all_gather(host_name()))
    if len(hosts) > 1:
        own, _ = network_of_program()
    drawn = group.objects.broadcast(os.urandom(32))
    have_own = all(group.objects.all_gather(own is not None))  # not with BRAID_INSECURE_NETWORK
    key = own.sign(_LABEL, drawn) if own is not None and have_own else drawn
    return Secret(key, seals_frames=wants_frame_codes())


def can_be_reached(address: str) -> bool:
    """Whether other hosts can reach an address."""
    return bool(address) and not Address.parse(address).is_loopback
