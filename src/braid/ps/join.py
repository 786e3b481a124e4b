"""`join`: become the scheduler, a server or a worker of a parameter server.

    with ps.join(braid.init(), servers=2) as node:       # rank 0 schedules, ranks 1 and 2 serve
        weights = node.dense("weights", torch.zeros(64, 10), partial(torch.optim.SGD, lr=0.5))
        if not node.is_worker:
            node.serve()                                 # until all workers have left
        else:
            for _ in range(100):
                w = weights.pull()
                ...
                weights.push(grad)

All ranks declare the same tables. The group of all ranks carries addresses and a secret only.

Source: M. Li et al., Parameter Server, OSDI 2014, section 4.
"""

from __future__ import annotations

import os

from braid.comm import Group
from braid.errors import ConfigError
from braid.message import SocketVan, VanConfig
from braid.ps.messages import SCHEMA
from braid.ps.node import Node, Role
from braid.ps.options import Options
from braid.ps.postoffice import SCHEDULER, server_node, worker_node
from braid.wire import Secret

__all__ = ["join", "name_of", "role_of"]

SERVERS = "BRAID_SERVERS"  # number of servers, as `braid run --servers` says
REPLICAS = "BRAID_REPLICAS"  # copies of each shard, as `braid run --replicas` says
VAN = VanConfig(max_queue_bytes=1 << 40, max_queue_messages=1 << 20)  # a server waits for nobody


def join(
    group: Group,
    servers: int | None = None,
    options: Options | None = None,
    *,
    address: str = "tcp://127.0.0.1:0",
) -> Node:
    """Become the scheduler, a server or a worker; a collective.

    Args:
        group: All ranks: the scheduler, then the servers, then the workers.
        servers: Number of servers; what `braid run --servers` says when None.
        options: Choices of the whole parameter server; its replicas are what `braid run --replicas`
            says when None.
        address: Address on which scheduler and servers listen.

    Raises:
        ConfigError: There is no server or no worker.
    """
    if servers is None:
        text = os.environ.get(SERVERS, "")
        if not text.isdecimal():
            msg = (
                "how many ranks are servers? Pass servers=, or start with "
                f"braid run --servers N --workers M ({SERVERS} is {text!r})"
            )
            raise ConfigError(msg)
        servers = int(text)
    options = options or Options(replicas=int(os.environ.get(REPLICAS, "0")))
    workers = group.size - 1 - servers
    if servers < 1 or workers < 1:
        msg = (
            f"{group.size} ranks with {servers} servers: a parameter server has one scheduler, at "
            "least one server and at least one worker"
        )
        raise ConfigError(msg)
    secret = Secret(group.objects.broadcast(os.urandom(32)))
    run_id = group.objects.broadcast(os.urandom(8).hex())
    role, number = role_of(group.rank, servers)
    listen = "" if role == "worker" else address
    van = SocketVan(
        name_of(role, number), SCHEMA, secret=secret, run_id=run_id, listen=listen, config=VAN
    )
    scheduler = group.objects.broadcast(van.address)
    node = Node(
        van,
        role,
        number,
        (servers, workers),
        scheduler,
        options,
        events=group.context.events,
    )
    group.barrier()  # the scheduler listens, and knows what it waits for
    return node


def role_of(rank: int, servers: int) -> tuple[Role, int]:
    """Return role and number of a rank."""
    if rank == 0:
        return "scheduler", 0
    return ("server", rank - 1) if rank <= servers else ("worker", rank - 1 - servers)


def name_of(role: Role, number: int) -> str:
    """Return the name of a node."""
    names = {"server": server_node(number), "worker": worker_node(number)}
    return names.get(role, SCHEDULER)
