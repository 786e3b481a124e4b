"""Rendezvous of the nodes of a parameter server: as ranks of a group, or one by one.

    with ps.join(braid.init(), servers=2) as node:       # rank 0 schedules, ranks 1 and 2 serve
        ...

    node = ps.join_running(address, secret, run_id, "server", 3, (3, 2))  # a running job

Ranks use the group only to exchange the scheduler's address and the input of the secret. A node
that joins later gets address and secret from the program that starts it. A process that `braid run
--restarts` starts for a lost worker or server reads the address from the launcher's store, and
derives the secret from the job's secret.

Source: M. Li et al., Parameter Server, OSDI 2014, sections 4.4 and 4.5.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
import torch

from braid.comm import Group
from braid.errors import ConfigError
from braid.ps.messages import SCHEMA, Called
from braid.ps.node import Node
from braid.ps.protocol.directory import SPARE, Role, name_of
from braid.ps.protocol.scheduler_state import OnWorkerLoss
from braid.ps.scheduler import Options
from braid.runtime.events import Recorder
from braid.runtime.message import Delivery, PeerLost, Schema, SocketVan, VanConfig
from braid.runtime.rendezvous import JobEnvironment, wants_frame_codes, wants_portable
from braid.runtime.rendezvous.job_store import open_job_store
from braid.runtime.rendezvous.network import network_of_program
from braid.runtime.store import PrefixStore, Store
from braid.runtime.transport.meeting import host_name
from braid.runtime.transport.peer_connections import own_address
from braid.runtime.variables import ON_WORKER_LOSS, REPLICAS, SERVERS, SPARES
from braid.runtime.wire import Address, Secret, local_address

__all__ = ["VAN", "NodePlace", "assign_place", "join", "join_running", "make_van", "wait_for_call"]

VAN = VanConfig(max_queue_bytes=1 << 40, max_queue_messages=1 << 20)  # sends never block
_LABEL = b"braid parameter server"
_RECORD = "run"  # in the launcher's store
MEET_S = 300.0  # to connect to the launcher's store, and to find the scheduler's record there

Value = TypeVar("Value")


def join(
    group: Group,
    servers: int | None = None,
    options: Options | None = None,
    *,
    spares: int | None = None,
    address: str = "",
) -> Node:
    """Join the ranks of a group as scheduler, servers, workers and spares; a collective.

    On a spare it returns once the spare replaces a lost worker, or when the run is over. A process
    that `braid run --restarts` starts takes the role of a lost worker or server. Workers begin at
    the step `node.resume()`, so that a replacement continues where the lost worker stopped.

    Args:
        group: All ranks: the scheduler, then the servers, then the workers, then the spares.
        servers: Number of servers; the value of `braid run --servers` when None.
        options: Options of the whole parameter server.
        spares: Number of spares; the value of `braid run --spares` when None.
        address: Address on which scheduler and servers listen; one that all ranks can reach when
            empty.

    Returns:
        The node of this rank.

    Raises:
        ConfigError: The group has no server or no worker.
        PeerLostError: The run failed while this spare waited.
    """
    if servers is None:
        text = os.environ.get(SERVERS, "")
        if not text.isdecimal():
            msg = (
                "the number of servers is unknown: pass servers=, or start with braid run "
                f"--servers N --workers M ({SERVERS} is {text!r})"
            )
            raise ConfigError(msg)
        servers = int(text)
    spares = _number(SPARES) if spares is None else spares
    options = _completed(options or Options(), "replace" if spares else "fail")
    launched = JobEnvironment.from_os()
    if launched.replaces >= 0:
        return _replace_lost(group, launched, options, address)
    place = assign_place(group, servers, spares, address)
    van = _van(place, options)
    scheduler = group.objects.broadcast(van.address)
    counts = (servers, group.size - 1 - servers - spares)
    if launched.launched_by == "braid" and place.role == "scheduler":
        record = _RunRecord(van.address, place.run_id, counts)
        _with_store(launched, lambda store: store.set(_RECORD, msgspec.json.encode(record)))
    ranks = {name_of(*role_of(place, servers)): rank for place, rank in enumerate(group.ranks)}
    make = partial(
        Node,
        counts=counts,
        scheduler=scheduler,
        options=options,
        events=group.context.events,
        ranks=ranks,
    )
    node = make(van, place.role, place.number, has_ended=partial(_has_ended, group, group.ranks[0]))
    group.barrier()  # the scheduler listens, and has its state
    called = wait_for_call(node) if place.role == SPARE else None
    if called is None:
        return node
    node.postoffice.close(0.0)  # nothing is in flight
    return make(_van(place._replace(role="worker", number=called), options), "worker", called)


class _RunRecord(msgspec.Struct, frozen=True):
    """Record in the launcher's store with which a new process can replace a lost one.

    Attributes:
        scheduler: Address of the scheduler.
        run_id: Name of the parameter server.
        counts: Number of servers and of workers at the beginning.
    """

    scheduler: str
    run_id: str
    counts: tuple[int, int]


def _with_store(launched: JobEnvironment, use: Callable[[Store], Value]) -> Value:
    """Call `use` with the store of braid's launcher; return its result."""
    job = open_job_store(launched, MEET_S)
    try:
        return use(PrefixStore("ps/", job.store))
    finally:
        assert job.connection is not None, "braid's launcher serves the store"
        job.connection.close()


def _replace_lost(group: Group, launched: JobEnvironment, options: Options, address: str) -> Node:
    """Join as the replacement of the worker or server that the launcher names."""

    def read(store: Store) -> bytes:
        store.wait([_RECORD], MEET_S)
        return store.get(_RECORD)

    record = msgspec.json.decode(_with_store(launched, read), type=_RunRecord)
    role, number = role_of(launched.replaces, record.counts[0])
    if role == "server":
        number = launched.rank  # no earlier server has had this number
    secret, network = network_of_program()
    assert secret is not None, "braid's launcher has given this process the secret"
    if not address and not Address.parse(record.scheduler).is_loopback:
        address = str(Address(host=network.listen or own_address(network), port=0))
    return join_running(
        record.scheduler,
        _signed_secret(secret, record.run_id),
        record.run_id,
        role,
        number,
        record.counts,
        options=options,
        address=address,
        events=group.context.events,
        has_ended=partial(_has_ended, group, 0),
    )


class NodePlace(NamedTuple):
    """Role and number of a node, and the data that its van needs to connect to other nodes.

    Attributes:
        role: Role of the node.
        number: Number of this server, worker or spare.
        secret: Secret of the connections.
        run_id: Name of the job.
        listen: Address to listen on.
    """

    role: Role
    number: int
    secret: Secret
    run_id: str
    listen: str


def assign_place(group: Group, servers: int, spares: int = 0, address: str = "") -> NodePlace:
    """Return the role, number and connection data of this rank; a collective.

    Raises:
        ConfigError: The group has no server or no worker.
    """
    workers = group.size - 1 - servers - spares
    if servers < 1 or workers < 1:
        msg = (
            f"{group.size} ranks with {servers} servers: a parameter server has one scheduler, "
            "at least one server and at least one worker. Change the numbers"
        )
        raise ConfigError(msg)
    run_id = group.objects.broadcast(os.urandom(8).hex())
    secret = connection_secret(group, run_id)
    role, number = role_of(group.rank, servers)
    if role == "worker" and number >= workers:
        role, number = SPARE, number - workers
    address = address or listening_address(group, name_of(role, number))
    return NodePlace(role, number, secret, run_id, address)


def role_of(rank: int, servers: int) -> tuple[Role, int]:
    """Return the role and number of a rank: first the scheduler, then servers, then workers."""
    if rank == 0:
        return "scheduler", 0
    return ("server", rank - 1) if rank <= servers else ("worker", rank - 1 - servers)


def _has_ended(group: Group, scheduler: int) -> bool:
    """Return whether the process with the scheduler's rank has exited without an error."""
    health = group.context.health
    health.collect()
    loss = health.lost.get(scheduler)
    return loss is not None and loss.departed


def _completed(options: Options, on_loss: OnWorkerLoss) -> Options:
    """Return options with missing values filled from the launcher's, then from defaults.

    Raises:
        ConfigError: An option of the launcher and of the program differ.
    """
    launched: dict[str, object] = {}
    if number := _number(REPLICAS):
        launched["replicas"] = number
    if policy := os.environ.get(ON_WORKER_LOSS, ""):
        launched["on_worker_loss"] = policy
    chosen = {name: getattr(options, name) for name in ("replicas", "on_worker_loss")}
    differ = [n for n, value in launched.items() if chosen[n] is not None and chosen[n] != value]
    if differ:
        pairs = ", ".join(f"{name}: {launched[name]} and {chosen[name]}" for name in differ)
        msg = f"braid run and the program's Options differ in {pairs}: leave one of them out"
        raise ConfigError(msg)
    filled = {"replicas": 0, "on_worker_loss": on_loss, **launched}
    missing = {name: value for name, value in filled.items() if chosen[name] is None}
    return replace(options, **missing)  # type: ignore[arg-type]


def _number(name: str) -> int:
    """Return the number in an environment variable; 0 when it is not set."""
    text = os.environ.get(name, "0")
    if not text.isdecimal():
        msg = f"{name} must be a number, got {text!r}"
        raise ConfigError(msg)
    return int(text)


def wait_for_call(node: Node) -> int | None:
    """Wait until a spare is called, or the run ends.

    Returns:
        Number of the worker to replace; None if the run has ended.
    """
    calls: list[int] = []
    # torch imports its compiler with the first optimizer of a process: do it before a call comes
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)

    def on_call(delivery: Delivery) -> None:
        assert isinstance(delivery.message, Called), "this handler is for calls"
        calls.append(delivery.message.worker)

    office = node.postoffice
    office.register({Called: on_call})
    office.begin()

    def is_over() -> bool:
        over = office.directory is not None and not office.directory.workers
        return bool(calls or office.failure or over)

    with office.events.span("spare"):
        office.wait_until(is_over, math.inf)  # no deadline for losses
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
    events: Recorder | None = None,
    has_ended: Callable[[], bool] = lambda: False,
) -> Node:
    """Join a running job as a new node, or start the scheduler of a job.

    A server receives shards from other servers once it serves. With `on_worker_loss="wait"` a
    worker takes the place of the lost worker with its number: it declares the tables, then calls
    `Node.resume`. A worker with a new number begins at the clock `start`, which must be ahead of
    all other workers.

    Args:
        scheduler: Address of the scheduler, its `node.address`; empty for the scheduler.
        secret: Secret of the job.
        run_id: Name of the job.
        role: Role of this node.
        number: Number of this server, or of this worker. A server that replaces a lost one needs a
            new number.
        counts: Number of servers and of workers with which the job began.
        options: Options of the whole parameter server; the same on all nodes.
        start: First clock of a worker with a new number.
        address: Address on which scheduler and servers listen; one that only this host can reach
            when empty.
        events: Recorder of waits and pushes; a private one when None.
        has_ended: Returns whether the scheduler's process has ended without an error; a server
            that comes too late then exits as well.

    Raises:
        ConfigError: The role is unknown, or the scheduler's address is missing.
    """
    if role not in ("scheduler", "server", "worker", SPARE) or bool(scheduler) == (
        role == "scheduler"
    ):
        msg = (
            f"got role {role} and the scheduler's address {scheduler!r}: pass scheduler, server, "
            "worker or spare, and for all but the scheduler its address (node.address there)"
        )
        raise ConfigError(msg)
    options = options or Options()
    address = address or local_address(f"ps-{name_of(role, number)}")
    van = _van(NodePlace(role, number, secret, run_id, address), options)
    make = partial(Node, start=start, events=events, has_ended=has_ended)
    return make(van, role, number, counts, scheduler, options)


def _van(place: NodePlace, options: Options) -> SocketVan:
    """Return the van of a node of tables; a worker does not listen."""
    config = replace(
        VAN,
        max_message_bytes=1 << 40,  # the program's tables determine the size
        shared_memory=options.shared_memory and not wants_portable(),
    )
    listens = place.role in {"scheduler", "server"}
    return make_van(place if listens else place._replace(listen=""), SCHEMA, config)


def make_van(
    place: NodePlace,
    schema: Schema,
    config: VanConfig,
    *,
    drop: float = 0.0,
    listen_anywhere: bool | None = None,
) -> SocketVan:
    """Return the van of a node.

    Args:
        place: Place of the node.
        schema: Message types of the node.
        config: Limits and times.
        drop: Fraction of the arriving messages to drop, 0 to 1 (exclusive), for tests of programs.
        listen_anywhere: Whether the node may listen on an address that other hosts can reach. If
            None, it may if `place` has an address other than loopback.

    Raises:
        ConfigError: The fraction is out of range, or the address cannot be used.
    """
    if not 0 <= drop < 1:
        msg = f"the share of messages to drop must be from 0 to 1, got {drop}"
        raise ConfigError(msg)
    if listen_anywhere is None:
        listen_anywhere = bool(place.listen) and not Address.parse(place.listen).is_loopback
    node = name_of(place.role, place.number)
    van = (DroppingVan if drop else SocketVan)(
        node,
        schema,
        secret=place.secret,
        run_id=place.run_id,
        listen=place.listen,
        listen_anywhere=listen_anywhere,
        config=config,
    )
    if isinstance(van, DroppingVan):
        van.drop, van.draws = drop, random.Random(f"0 {node}")
    return van


class DroppingVan(SocketVan):
    """A `SocketVan` that drops a fraction of arriving messages, as PS-Lite's PS_DROP_MSG does.

    Attributes:
        drop: Fraction of the messages to drop.
        draws: Random generator that selects the dropped messages.
        num_dropped: Number of dropped messages.
    """

    drop: float
    draws: random.Random
    num_dropped = 0

    def _next_delivery(self) -> Delivery | None:
        """Return the next message that is not dropped; notices of losses are never dropped."""
        while (delivery := super()._next_delivery()) is not None:
            if isinstance(delivery.message, PeerLost) or self.draws.random() >= self.drop:
                return delivery
            self.num_dropped += 1
        return None


def listening_address(group: Group, node: str) -> str:
    """Return an address to listen on that all ranks of a group can reach; a collective.

    On one host it is a unix socket, which has three times the throughput of TCP's loopback. On
    several hosts it is this host's address on the network of the job, as for collectives.

    Raises:
        ConfigError: This host has no address on that network.
    """
    if len(set(group.objects.all_gather(host_name()))) == 1:
        return local_address(f"ps-{node}")
    _, network = network_of_program()
    return str(Address(host=network.listen or own_address(network), port=0))


def connection_secret(group: Group, run_id: str) -> Secret:
    """Return the secret of the connections between nodes; a collective.

    Frames between hosts are not encrypted, so the secret is not sent: each rank derives it from the
    job's secret. If a rank does not have that secret (without a launcher, or with
    `BRAID_INSECURE_NETWORK`), the first rank broadcasts random bytes as the secret.
    """
    job_secret, _ = network_of_program()
    drawn = group.objects.broadcast(os.urandom(32))
    have_own = all(group.objects.all_gather(job_secret is not None))
    if job_secret is not None and have_own:
        return _signed_secret(job_secret, run_id)
    return Secret(drawn, seals_frames=wants_frame_codes())


def _signed_secret(secret: Secret, run_id: str) -> Secret:
    """Return the secret of a parameter server, derived from the job's secret."""
    return Secret(secret.sign(_LABEL, run_id.encode()), seals_frames=wants_frame_codes())
