"""Rendezvous of the nodes of a parameter server: as ranks of a group, or one by one.

    with ps.join(braid.init(), servers=2) as node:       # rank 0 schedules, ranks 1 and 2 serve
        ...

    node = ps.join_running(address, secret, run_id, "server", 3, (3, 2))  # a job that runs already

The group of all ranks carries the address of the scheduler, and what the secret needs, only. A
node that comes later needs both from the program that starts it.

Source: M. Li et al., Parameter Server, OSDI 2014, sections 4.4 and 4.5.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from functools import partial

from braid.comm import Group
from braid.errors import CommTimeout, ConfigError
from braid.ps.addresses import can_be_reached, connection_secret, listening_address
from braid.ps.messages import SCHEMA, Called
from braid.ps.node import Node
from braid.ps.options import Options
from braid.ps.protocol.scheduler_state import OnWorkerLoss
from braid.ps.roles import SCHEDULER, Role, name_of, role_of
from braid.runtime.message import Delivery, SocketVan, VanConfig
from braid.runtime.rendezvous import wants_portable
from braid.runtime.wire import Secret, local_address

__all__ = ["join", "join_running"]

SERVERS = "BRAID_SERVERS"  # number of servers, as `braid run --servers` says
ON_WORKER_LOSS = "BRAID_ON_WORKER_LOSS"  # as `braid run --on-worker-loss` says
SPARES = "BRAID_SPARES"  # processes for workers that are lost, as `braid run --spares` says
REPLICAS = "BRAID_REPLICAS"  # copies of each shard, as `braid run --replicas` says


def join(
    group: Group,
    servers: int | None = None,
    options: Options | None = None,
    *,
    spares: int | None = None,
    address: str = "",
) -> Node:
    """Become the scheduler, a server or a worker; a collective.

    A spare becomes a worker once one is lost, and this function returns then, or when the run is
    over. So that it goes on where the other ended, workers begin at the step `node.resume()`.

    Args:
        group: All ranks: the scheduler, then the servers, then the workers, then the spares.
        servers: Number of servers; what `braid run --servers` says when None.
        options: Choices of the whole parameter server; its replicas are what `braid run --replicas`
            says when None.
        spares: Number of spares; what `braid run --spares` says when None.
        address: Address on which scheduler and servers listen; one that all ranks can reach when
            empty.

    Raises:
        ConfigError: There is no server or no worker.
        PeerLostError: A spare learns that the run cannot go on.
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
    spares = _number(SPARES) if spares is None else spares
    options = _completed(options or Options(), "replace" if spares else "fail")
    workers = group.size - 1 - servers - spares
    if servers < 1 or workers < 1:
        msg = (
            f"{group.size} ranks with {servers} servers: a parameter server has one scheduler, at "
            "least one server and at least one worker"
        )
        raise ConfigError(msg)
    secret = connection_secret(group)
    run_id = group.objects.broadcast(os.urandom(8).hex())
    role, number = role_of(group.rank, servers)
    if role == "worker" and number >= workers:
        role, number = "spare", number - workers
    address = address or listening_address(group, name_of(role, number))
    van = _van(role, number, secret, run_id, options, address)
    scheduler = group.objects.broadcast(van.address)
    events = group.context.events
    has_ended = partial(_scheduler_ended, group)
    counts = servers, workers
    ranks = {name_of(*role_of(place, servers)): rank for place, rank in enumerate(group.ranks)}
    make = partial(Node, counts=counts, scheduler=scheduler, options=options, events=events)
    node = make(van, role, number, has_ended=has_ended, ranks=ranks)
    group.barrier()  # the scheduler listens, and knows what it waits for
    called = _wait_for_call(node) if role == "spare" else None
    if called is None:
        return node
    node.close()
    van = _van("worker", called, secret, run_id, options, address)
    return make(van, "worker", called, ranks=ranks)


def _scheduler_ended(group: Group) -> bool:
    """Return whether the scheduler's process, the first of the group, has ended on purpose."""
    health = group.context.health
    health.collect()
    loss = health.lost.get(group.ranks[0])
    return loss is not None and loss.left


def _completed(options: Options, on_loss: OnWorkerLoss) -> Options:
    """Return options with what the launcher says, where the program says nothing.

    Raises:
        ConfigError: The launcher and the program say different things.
    """
    launched: dict[str, object] = {}
    if number := _number(REPLICAS):
        launched["replicas"] = number
    if policy := os.environ.get(ON_WORKER_LOSS, ""):
        launched["on_worker_loss"] = policy
    own = {name: getattr(options, name) for name in ("replicas", "on_worker_loss")}
    differ = [n for n, value in launched.items() if own[n] is not None and own[n] != value]
    if differ:
        pairs = ", ".join(f"{name}: {launched[name]} and {own[name]}" for name in differ)
        msg = f"braid run and the program's Options differ in {pairs}: leave one of them out"
        raise ConfigError(msg)
    filled = {"replicas": 0, "on_worker_loss": on_loss, **launched}
    missing = {name: value for name, value in filled.items() if own[name] is None}
    return replace(options, **missing)  # type: ignore[arg-type]


def _number(name: str) -> int:
    """Return the number in an environment variable; 0 when it is not set."""
    text = os.environ.get(name, "0")
    if not text.isdecimal():
        msg = f"{name} must be a number, got {text!r}"
        raise ConfigError(msg)
    return int(text)


def _wait_for_call(node: Node) -> int | None:
    """Return the number of the worker in whose place a spare is called; None if it is not."""
    calls: list[int] = []

    def on_call(delivery: Delivery) -> None:
        assert isinstance(delivery.message, Called), "this handler is for calls"
        calls.append(delivery.message.worker)

    office = node.postoffice
    office.register({Called: on_call})
    office.van.connect(SCHEDULER, office.scheduler)
    office.announce()

    def is_over() -> bool:
        over = office.directory is not None and not office.directory.workers
        return bool(calls or office.failure or over)

    with office.events.span("spare"):
        while not is_over():
            with contextlib.suppress(CommTimeout):  # there is no deadline for losses
                office.wait_until(is_over, 3600.0)
    office.raise_failure()
    return calls[0] if calls else None


def join_running(
    scheduler: str,
    secret: Secret,
    run_id: str,
    role: Role,
    number: int,
    counts: tuple[int, int],
    *,
    options: Options | None = None,
    start: int = 0,
    address: str = "",
) -> Node:
    """Make a node of a job whose scheduler runs already, or the scheduler itself.

    A server gets shards from the others once it serves. A worker takes the place of a lost one of
    its number where `on_worker_loss="wait"`: it declares the tables, then calls `Node.resume`. A
    worker of a new number begins at the clock `start`, which must lie ahead of the others.

    Args:
        scheduler: Address of the scheduler, its `node.address`; empty for the scheduler.
        secret: Secret of the job.
        run_id: Name of the job.
        role: Role of this node.
        number: Number of this server, or of this worker. A server that replaces a lost one has a
            number of its own.
        counts: Number of servers and of workers with which the job began.
        options: Choices of the whole parameter server; the same on all nodes.
        start: First clock of a worker that has joined never before.
        address: Address on which scheduler and servers listen; one that only this host can reach
            when empty.

    Raises:
        ConfigError: The role is unknown, or a node other than the scheduler has no address of it.
    """
    if role not in ("scheduler", "server", "worker") or bool(scheduler) == (role == "scheduler"):
        msg = (
            f"a {role} with the scheduler's address {scheduler!r}: role must be scheduler, server "
            "or worker, and all but the scheduler itself need its address (node.address there)"
        )
        raise ConfigError(msg)
    options = options or Options()
    van = _van(role, number, secret, run_id, options, address)
    return Node(van, role, number, counts, scheduler, options, start=start)


def _van(
    role: Role, number: int, secret: Secret, run_id: str, options: Options, address: str
) -> SocketVan:
    """Return the van of a node; a worker does not listen."""
    config = VanConfig(
        max_queue_bytes=1 << 40,  # a server waits for nobody
        max_queue_messages=1 << 20,
        max_message_bytes=1 << 40,  # as large as the tables that the program declares
        shared_memory=options.shared_memory and not wants_portable(),
    )
    node = name_of(role, number)
    address = address or local_address(f"ps-{node}")
    listen = "" if role in {"worker", "spare"} else address
    return SocketVan(
        node,
        SCHEMA,
        secret=secret,
        run_id=run_id,
        listen=listen,
        listen_anywhere=can_be_reached(listen),
        config=config,
    )
