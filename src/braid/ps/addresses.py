"""Addresses of a parameter server's nodes, such that all other nodes reach them."""

from __future__ import annotations

from braid.comm import Group
from braid.rendezvous.network import network_of_program
from braid.transport.meeting import host_name
from braid.transport.peer_connections import own_address
from braid.wire import Address, local_address

__all__ = ["can_be_reached", "listening_address"]


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


def can_be_reached(address: str) -> bool:
    """Whether other hosts can reach an address."""
    return bool(address) and not Address.parse(address).is_loopback
