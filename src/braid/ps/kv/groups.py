"""Numbers of nodes and groups, and the key ranges of servers, as in PS-Lite.

    scheduler  id 1      group 1
    server i   id 8+2i   group 2
    worker i   id 9+2i   group 4          groups are added: servers and workers are group 6

Server i of n has the keys from i * 2^64 / n to (i + 1) * 2^64 / n. PS-Lite divides 2^64 - 1 and
drops the remainder, so that the last keys belong to no server.

Source: PS-Lite, `include/ps/base.h` and `Postoffice::GetServerKeyRanges`.
"""

from __future__ import annotations

from itertools import pairwise

from braid.errors import ConfigError
from braid.ps.protocol.directory import SCHEDULER, server_node, worker_node
from braid.runtime.message import split_node

__all__ = [
    "ALL",
    "NUM_KEYS",
    "SCHEDULER_GROUP",
    "SERVER_GROUP",
    "WORKER_GROUP",
    "id_of",
    "key_ranges",
    "members_of",
    "node_of",
]

SCHEDULER_GROUP = 1
SERVER_GROUP = 2
WORKER_GROUP = 4
ALL = SCHEDULER_GROUP + SERVER_GROUP + WORKER_GROUP
NUM_KEYS = 1 << 64
FIRST_ID = 8  # smaller numbers are groups


def id_of(node: str) -> int:
    """Return the number of the node with a name, such as 8 for `server:0`."""
    role, number = split_node(node)
    if role == SCHEDULER:
        return SCHEDULER_GROUP
    return FIRST_ID + 2 * number + (role == "worker")


def node_of(number: int) -> str:
    """Return the name of the node with a number.

    Raises:
        ConfigError: The number is not a valid node number.
    """
    if number == SCHEDULER_GROUP:
        return SCHEDULER
    if number < FIRST_ID:
        msg = (
            f"{number} is not the number of a node: pass 8, 10, ... for servers or 9, 11, ... "
            "for workers"
        )
        raise ConfigError(msg)
    place, is_worker = divmod(number - FIRST_ID, 2)
    return worker_node(place) if is_worker else server_node(place)


def members_of(group: int, num_servers: int, num_workers: int) -> list[str]:
    """Return the names of the nodes in a group or a sum of groups, or of the node `group`.

    Raises:
        ConfigError: The group or node does not exist.
    """
    servers = [server_node(number) for number in range(num_servers)]
    workers = [worker_node(number) for number in range(num_workers)]
    if not 1 <= group < FIRST_ID:
        node = node_of(group)
        if node not in {*servers, *workers}:
            msg = (
                f"node {group} ({node}) does not exist: the run has only {num_servers} servers "
                f"and {num_workers} workers"
            )
            raise ConfigError(msg)
        return [node]
    parts = {SCHEDULER_GROUP: [SCHEDULER], SERVER_GROUP: servers, WORKER_GROUP: workers}
    return [node for bit, nodes in parts.items() if group & bit for node in nodes]


def key_ranges(num_servers: int) -> list[tuple[int, int]]:
    """Return the range of keys of each server: (first key, last key + 1)."""
    bounds = [place * NUM_KEYS // num_servers for place in range(num_servers + 1)]
    return list(pairwise(bounds))
