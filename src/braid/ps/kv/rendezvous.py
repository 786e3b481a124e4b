"""`join`: become the scheduler, a server or a worker of key-value programs.

    with kv.join(braid.init(), servers=2) as node:      # rank 0 schedules, ranks 1 and 2 serve
        if node.is_server:
            server = kv.KVServer(node)
            server.set_request_handle(kv.KVServerDefaultHandle())
        elif node.is_worker:
            worker = kv.KVWorker(node)
            worker.wait(worker.push([1, 2], torch.ones(2)))

At the end of the block each node waits for all others.
"""

from __future__ import annotations

import dataclasses
import os

from braid.comm import Group
from braid.errors import ConfigError
from braid.ps.addresses import can_be_reached, connection_secret, listening_address
from braid.ps.kv.dropping_van import DroppingVan
from braid.ps.kv.messages import SCHEMA
from braid.ps.kv.node import KVNode
from braid.ps.roles import name_of, role_of
from braid.runtime.message import SocketVan, VanConfig
from braid.runtime.rendezvous import wants_portable
from braid.runtime.wire import Secret

__all__ = ["VAN", "join", "make_van"]

VAN = VanConfig(max_queue_bytes=1 << 40, max_queue_messages=1 << 20)  # nobody waits for a queue


def join(
    group: Group,
    servers: int,
    *,
    address: str = "",
    shared_memory: bool = True,
    resend_s: float | None = None,
    drop: float = 0.0,
    unknown_s: float = 5.0,
    timeout_s: float | None = None,
) -> KVNode:
    """Become a node; a collective.

    Args:
        group: All ranks: the scheduler, then the servers, then the workers.
        servers: Number of servers.
        address: Address on which nodes listen; one that all ranks can reach when empty.
        shared_memory: Whether large tensors between processes of one host pass through shared
            memory; never where `BRAID_PORTABLE` forbids it.
        resend_s: Seconds after which unanswered messages are sent again, for links that lose some.
        drop: Share of arriving messages that each node drops, for tests.
        unknown_s: Seconds for which a request waits for an app that does not exist yet.
        timeout_s: Deadline of the start.

    Raises:
        ConfigError: There is no server or no worker.
        CommTimeout: Some nodes have not come.
    """
    workers = group.size - 1 - servers
    if servers < 1 or workers < 1:
        msg = (
            f"{group.size} ranks with {servers} servers: there are one scheduler, at least one "
            "server and at least one worker"
        )
        raise ConfigError(msg)
    secret = connection_secret(group)
    run_id = group.objects.broadcast(os.urandom(8).hex())
    role, number = role_of(group.rank, servers)
    name = name_of(role, number)
    address = address or listening_address(group, name)
    van = make_van(
        name,
        secret,
        run_id,
        address,
        listen_anywhere=can_be_reached(address),
        drop=drop,
        config=dataclasses.replace(VAN, shared_memory=shared_memory and not wants_portable()),
    )
    scheduler = group.objects.broadcast(van.address)
    node = KVNode(
        van,
        role,
        number,
        (servers, workers),
        scheduler,
        resend_s=resend_s,
        unknown_s=unknown_s,
    )
    try:
        node.start(timeout_s)
    except BaseException:
        node.abort()
        raise
    return node


def make_van(
    node: str,
    secret: Secret,
    run_id: str,
    listen: str,
    *,
    listen_anywhere: bool = False,
    drop: float = 0.0,
    config: VanConfig = VAN,
) -> SocketVan:
    """Return the van of a node, which drops messages if that is asked for."""
    if not drop:
        return SocketVan(
            node,
            SCHEMA,
            secret=secret,
            run_id=run_id,
            listen=listen,
            listen_anywhere=listen_anywhere,
            config=config,
        )
    return DroppingVan(
        node,
        SCHEMA,
        drop=drop,
        secret=secret,
        run_id=run_id,
        listen=listen,
        listen_anywhere=listen_anywhere,
        config=config,
    )
