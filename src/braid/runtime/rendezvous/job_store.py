"""Opens the store of a job: the store of braid's launcher, or torch's.

Ranks use it through `membership`; the nodes of remote calls, which are not ranks, use it directly.
"""

from __future__ import annotations

import datetime as dt
import errno
import os
import socket
from typing import NamedTuple

from torch import distributed as dist

from braid.errors import RendezvousError
from braid.runtime.rendezvous.environment import JobEnvironment
from braid.runtime.rendezvous.network import network_of
from braid.runtime.store import STORE_LIMITS, STORE_ROLE, HashStore, PrefixStore, Store, StoreClient
from braid.runtime.store.torch_store import TorchStore
from braid.runtime.transport import Network
from braid.runtime.wire import Connection, Identity, Secret
from braid.runtime.wire import connect as dial

__all__ = ["JobStore", "dial_store", "open_job_store", "torch_store"]


class JobStore(NamedTuple):
    """The store of a job.

    Attributes:
        store: The store.
        secret: Secret of the job; None if neither the launcher nor the user has set one.
        network: Settings of the network.
        connection: Connection to the launcher's store, which the user closes; None for other
            stores.
    """

    store: Store
    secret: Secret | None
    network: Network
    connection: Connection | None = None


def open_job_store(environment: JobEnvironment, timeout_s: float) -> JobStore:
    """Open the store of a job.

    Raises:
        RendezvousError: The store cannot be reached.
        ConfigError: The file of the secret is missing, or other users can read it.
    """
    if environment.launched_by == "braid":
        launchers, connection = dial_store(environment, timeout_s)
        secret, network = network_of(environment, launchers)
        return JobStore(StoreClient(connection), secret, network, connection)
    user_secret, network = network_of(environment, None)
    if environment.has_torch_store:
        return JobStore(torch_store(environment, timeout_s), user_secret, network)
    return JobStore(HashStore(), user_secret, network)


def dial_store(environment: JobEnvironment, timeout_s: float) -> tuple[Secret, Connection]:
    """Return the job's secret, and a connection to the store of braid's launcher."""
    secret_fd = -1 if environment.secret_fd is None else environment.secret_fd
    secret = Secret.from_fd(os.dup(secret_fd))  # the descriptor stays open for others
    identity = Identity(environment.run_id, STORE_ROLE, environment.rank)
    connection = dial(
        environment.store_address, secret, identity, timeout_s=timeout_s, limits=STORE_LIMITS
    )
    return secret, connection


def torch_store(environment: JobEnvironment, timeout_s: float) -> Store:
    """Return torch's store on `master_addr`, served by the launcher or else by rank 0."""
    timeout = dt.timedelta(seconds=timeout_s)
    host, port = environment.master_addr, environment.master_port
    serves = environment.rank == 0 and not environment.agent_store
    listen_fd = None
    try:
        if serves:  # torch itself would listen on every interface
            listen_fd = _listen(host, port)
        store = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not list it for checkers
            host,
            port,
            environment.world_size,
            serves,
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listen_fd,
        )
    except (OSError, RuntimeError) as exc:
        role = "serve" if serves else "reach"
        msg = (
            f"rank {environment.rank} cannot {role} the store at MASTER_ADDR:MASTER_PORT "
            f"{host}:{port}: {str(exc).splitlines()[0]}. Choose another MASTER_PORT, or check that "
            "rank 0 is running"
        )
        raise RendezvousError(msg) from exc
    return PrefixStore("braid/", TorchStore(store, timeout_s))


def _listen(host: str, port: int) -> int | None:
    """Return a socket that listens; None if the port is in use.

    Torch then uses the server that this process already has at the port, such as that of its
    ranks; without one it fails.
    """
    try:
        return socket.create_server((host, port), backlog=1024).detach()
    except OSError as exc:
        if exc.errno != errno.EADDRINUSE:
            raise
        return None
