"""Nodes come and go: `init_rpc` and `shutdown`.

    store of the job ── names, addresses, secret ──> van ──> Agent

Nodes find each other in the store of the job: that of braid's launcher, torch's under torchrun or
with MASTER_ADDR and MASTER_PORT, or a file. With a world size all wait for all; without one, nodes
may come and go at any time. A graceful shutdown ends when no node has anything under way: all
publish how many calls they have sent, until two rounds give the same sum.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from pathlib import Path
from urllib.parse import urlparse

from braid.errors import BraidError, CommTimeout, ConfigError, RendezvousError
from braid.rpc.agent import Agent
from braid.rpc.current import current_agent, has_default, set_default
from braid.rpc.messages import SCHEMA
from braid.rpc.options import RpcOptions
from braid.rpc.outcomes import RpcError
from braid.rpc.references import receive, share
from braid.rpc.roles import own_role
from braid.rpc.scope import CallSpans
from braid.rpc.streams import OpenStreams
from braid.rpc.workers import WorkerDirectory, WorkerInfo, WorkerRecord, check_name, node_of
from braid.runtime.events import Recorder
from braid.runtime.message import SocketVan, VanConfig
from braid.runtime.rendezvous import JobEnvironment, wants_portable
from braid.runtime.rendezvous.job_store import JobStore, open_job_store
from braid.runtime.rendezvous.launcher_link import LauncherLink, open_link
from braid.runtime.rendezvous.rank import claim
from braid.runtime.store import FileStore, PrefixStore, Store
from braid.runtime.transport import Network
from braid.runtime.transport.peer_connections import own_address
from braid.runtime.transport.reachability import probe
from braid.runtime.wire import Address, Secret, local_address

__all__ = ["init_rpc", "join", "shutdown"]

MEET_S = 300.0  # to wait for all nodes
_FIXED = "fixed"  # key that exists while a group with a fixed number of nodes lives
_GONE_S = 3.0  # for an earlier life of a node to accept a connection
_LOOK_S = 0.25  # after which a node that waits for others looks whether they live


def init_rpc(
    name: str = "",
    backend: object = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcOptions | None = None,
) -> None:
    """Make this process a node of remote calls.

    Args:
        name: Unique name of the node: letters, digits, `_`, `:` and `-`. When empty, the name of
            the node's role, see `roles`.
        backend: For programs of torch; not used.
        rank: Number of the node; set by the launcher when -1.
        world_size: Number of nodes, for which every node waits. When None and `rank` is -1, the
            launcher sets it. When None and `rank` is given, nodes may join and leave at any time.
        rpc_backend_options: Options of this node.

    Raises:
        ConfigError: An argument is invalid, or this process is a node already.
        RendezvousError: Some nodes did not come, or two nodes have the same name or number.
    """
    del backend
    if has_default():
        msg = (
            f"RPC is already initialized: this process is node {current_agent().info.name!r}, call "
            "shutdown() first"
        )
        raise RpcError(msg)
    name = name or own_role().node
    check_name(name)
    options = rpc_backend_options or RpcOptions()
    job, rank, world_size, is_local = _meet(options.init_method, rank, world_size)
    if options.allow_pickle and job.network.insecure:
        msg = (
            "allow_pickle=True allows peers to run any code: leave it out on a network without a "
            "secret"
        )
        raise ConfigError(msg)
    store: Store = PrefixStore("rpc/", job.store)
    with contextlib.ExitStack() as resources:
        if job.connection is not None:
            resources.callback(job.connection.close)
        if world_size is not None:
            store = _fixed_group(store, rank, resources)
        elif store.check([_FIXED]):
            msg = (
                f"node {name!r} was started without world_size, but other nodes of its group "
                "with one: pass world_size= on all nodes or on none"
            )
            raise RpcError(msg)
        link = _launcher_link(job, rank)
        if link is not None:
            resources.callback(link.close)
        agent = join(
            store,
            name,
            rank,
            world_size,
            options,
            secret=_secret(store, job, is_local=is_local),
            address=_address(job.network, is_local=is_local),
            recorder=None if link is None else link.recorder,
        )
        agent.resources.push(resources.pop_all())
    if link is not None:
        link.arrive()
        agent.resources.callback(link.leave)
    set_default(agent)


def _fixed_group(store: Store, rank: int, resources: contextlib.ExitStack) -> Store:
    """Return the store of a group with a fixed number of nodes; node 0 ends the group."""
    is_new = not _has_launcher() or JobEnvironment.from_os().replaces < 0
    # a process that was lost on its way has not claimed the rank
    number = claim(store, rank) if is_new else max(1, store.add(f"joins/{rank}", 0))
    group = PrefixStore(f"{number}/", store)
    store.set(_FIXED, b"1")

    def end() -> None:
        with contextlib.suppress(BraidError):  # the store may have ended before
            store.delete_key(_FIXED)

    if rank == 0:
        resources.callback(end)
    return group


def join(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    options: RpcOptions,
    *,
    secret: Secret,
    address: str,
    recorder: Recorder | None = None,
) -> Agent:
    """Return the agent of a new node; all nodes of a run share a store.

    Args:
        store: The store, under a prefix that no other nodes use.
        name: Name of the node.
        rank: Number of the node.
        world_size: Number of nodes to wait for; None if nodes may come and go.
        options: Options of the node.
        secret: Secret that all nodes share.
        address: Address on which the node listens.
        recorder: Recorder of the node's calls; None without a launcher that reads it.
    """
    config = VanConfig(
        max_message_bytes=1 << 40,
        shared_memory=options.shared_memory and not wants_portable(),
    )
    van = SocketVan(
        node_of(rank),
        SCHEMA,
        secret=secret,
        run_id="rpc",
        listen=address,
        listen_anywhere=not Address.parse(address).is_loopback,
        config=config,
    )
    directory = WorkerDirectory(store, MEET_S)
    record = WorkerRecord(name, rank, van.address, options.device_maps)
    try:
        directory.add(record, lambda gone: bool(probe({rank: gone}, van.clock, timeout_s=_GONE_S)))
        if world_size is not None:
            directory.wait_for(world_size)
    except BaseException as exc:
        van.close(0.0)
        if world_size is not None and isinstance(exc, RendezvousError):
            directory.leave(record, world_size)
        raise
    info, spans = WorkerInfo(name, rank), CallSpans(recorder, rank)
    return Agent(van, info, directory, options, spans, world_size, share=share, receive=receive)


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leave remote calls, once calls in flight have ended if `graceful`.

    Args:
        graceful: Whether to wait until no node has calls in flight; without a fixed world size,
            until this node has none.
        timeout: Seconds to wait; unlimited when 0. Lost nodes are not waited for.
    """
    agent = current_agent()
    try:
        leave(agent, graceful=graceful, timeout_s=timeout or None)
    finally:
        set_default(None)


def leave(agent: Agent, *, graceful: bool = True, timeout_s: float | None = None) -> None:
    """End a node; see `shutdown`. Idempotent."""
    if agent.peers.is_closed:
        return
    for stream in list(agent.part(OpenStreams)):
        stream.close_for(threading.get_ident())
    try:
        if graceful:
            agent.wait_idle(timeout_s)
            if agent.world_size is None:
                agent.directory.remove_own(agent.info)
            else:
                _wait_for_all(agent, timeout_s)
    finally:
        agent.close()


def _wait_for_all(agent: Agent, timeout_s: float | None) -> None:
    """Wait until two rounds give the same number of calls, over all nodes that live."""
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    store, before = agent.directory.store, None
    for number in range(1 << 30):
        agent.wait_idle(timeout_s)
        store.set(f"end/{number}/{agent.info.id}", str(agent.caller.num_begun).encode())
        total = 0
        for node in range(agent.world_size or 0):
            key = f"end/{number}/{node}"
            if _has_written(agent, node, key, until):
                total += int(store.get(key))
            elif time.monotonic() > until:
                return
        if total == before:
            break
        before = total
    store.set(f"end/left/{agent.info.id}", b"1")
    if agent.info.id == 0:  # it may hold the store
        for node in range(agent.world_size or 0):
            _has_written(agent, node, f"end/left/{node}", until)


def _has_written(agent: Agent, node: int, key: str, until: float) -> bool:
    """Wait until a node has set a key, is lost, or time is up; return whether it has set it."""
    store = agent.directory.store
    while not store.check([key]):  # first, since a node that has left takes long to reach
        left_s = until - time.monotonic()
        if left_s <= 0 or not agent.peers.is_alive(node):
            return store.check([key])
        with contextlib.suppress(CommTimeout):
            store.wait([key], min(left_s, _LOOK_S))
    return True


def _meet(
    init_method: str, rank: int, world_size: int | None
) -> tuple[JobStore, int, int | None, bool]:
    """Return the store of the job, this node's number, their count, and whether all are here."""
    place = urlparse(init_method)
    if place.scheme == "file":
        if rank < 0:
            msg = f"rank parameter missing: pass rank= with init_method {init_method}"
            raise ConfigError(msg)
        path = Path(place.netloc + place.path)
        return JobStore(FileStore(path), None, Network("", "")), rank, world_size, True
    if place.scheme not in {"env", "tcp"}:
        msg = f"init_method must begin with env://, tcp:// or file://, got {init_method!r}"
        raise ConfigError(msg)
    launched = JobEnvironment.from_os() if _has_launcher() else None
    if launched is not None and place.scheme == "env":
        fixed = launched.world_size if rank < 0 or world_size is not None else None
        rank = launched.place if rank < 0 else rank
        size = fixed if world_size is None else world_size
        is_local = launched.num_nodes == 1 and launched.local_world_size == launched.world_size
        return open_job_store(launched, MEET_S), rank, size, is_local
    host = place.hostname or os.environ.get("MASTER_ADDR", "")
    port = place.port or int(os.environ.get("MASTER_PORT", "0"))
    if rank < 0 or not host or not port:
        msg = (
            "this process has no launcher: start it with braid run, or pass rank= and world_size= "
            "and set MASTER_ADDR and MASTER_PORT, or init_method='tcp://host:port'"
        )
        raise ConfigError(msg)
    environment = JobEnvironment(
        rank=rank,
        world_size=max(world_size or 0, rank + 1, 2),
        local_rank=0,
        local_world_size=1,
        master_addr=host,
        master_port=port,
        launched_by="torchrun",
        secret_file=os.environ.get("BRAID_SECRET_FILE", ""),
        insecure_network=os.environ.get("BRAID_INSECURE_NETWORK", "") == "1",
        listen=os.environ.get("BRAID_LISTEN", ""),
    )
    is_local = Address(host=host, port=port).is_loopback or host == "localhost"
    return open_job_store(environment, MEET_S), rank, world_size, is_local


def _launcher_link(job: JobStore, rank: int) -> LauncherLink | None:
    """Return the link to braid's launcher, which traces calls of nodes numbered by rank."""
    if job.connection is None or job.secret is None:
        return None
    launched = JobEnvironment.from_os()
    return open_link(launched, job.secret, MEET_S) if launched.place == rank else None


def _has_launcher() -> bool:
    return bool(os.environ.get("BRAID_STORE") or os.environ.get("RANK"))


def _secret(store: Store, job: JobStore, *, is_local: bool) -> Secret:
    """Return the secret of the job, or a secret from the store that distinguishes a user's jobs."""
    if job.secret is not None:
        return job.secret
    if not is_local and not job.network.insecure:
        msg = (
            "nodes on several hosts need a secret: start them with braid run, or set "
            "BRAID_SECRET_FILE to a file (mode 0600) that all have"
        )
        raise ConfigError(msg)
    made = os.urandom(32).hex().encode()
    key = bytes.fromhex(store.compare_set("secret", b"", made).decode())
    return Secret(key, for_one_user=is_local)  # other users of the host can read torch's store


def _address(network: Network, *, is_local: bool) -> str:
    """Return the address on which a node listens."""
    if not is_local:
        return str(Address(host=network.listen or own_address(network), port=0))
    return local_address("rpc")
