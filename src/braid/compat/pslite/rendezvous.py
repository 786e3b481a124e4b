"""Rendezvous of nodes without a launcher: the scheduler assigns a number, and provides a secret.

    scheduler    listens at DMLC_PS_ROOT_URI:DMLC_PS_ROOT_PORT
    others       secret      from BRAID_SECRET_FILE; on one host from the scheduler's unix socket,
                             after the kernel confirms that both belong to the same user
                 number      candidate:<random> ── Candidate(role) ──> scheduler
                                                <── Numbered(number) ──
                 then connect again under that number

PS-Lite's nodes accept any connection. Here each connection must first prove that it knows the
secret.
"""

from __future__ import annotations

import os
import random
import socket
from dataclasses import replace

import msgspec

from braid.compat.pslite.environment import Environment
from braid.errors import ConfigError
from braid.ps import kv
from braid.ps.kv.messages import SCHEMA, Candidate, Numbered
from braid.ps.protocol.directory import SCHEDULER, Role
from braid.ps.rendezvous import VAN, NodePlace, make_van
from braid.runtime.message import Delivery, Schema, Service, SocketVan
from braid.runtime.rendezvous import wants_frame_codes
from braid.runtime.wire import SECRET_BYTES, Secret

__all__ = ["SecretDesk", "start_by_hand"]

TIMEOUT_S = 300.0
PUBLIC = Secret(bytes(SECRET_BYTES))  # publicly known: the kernel checks users, or nothing does


class SecretQuestion(msgspec.Struct, tag="pslite.secret?", frozen=True):
    """A process of this host asks the `SecretDesk` for the job's secret."""


class SecretAnswer(msgspec.Struct, tag="pslite.secret", frozen=True):
    """Answer to `SecretQuestion`: the job's secret."""

    key: bytes


DESK_SCHEMA = Schema(SecretQuestion, SecretAnswer)


class SecretDesk:
    """Server that sends the secret of a job on one host to processes of the same user.

    Args:
        port: Port of the scheduler, which names the job.

    Attributes:
        secret: The secret.
    """

    def __init__(self, port: int) -> None:
        key = os.urandom(SECRET_BYTES)
        self.secret = Secret(key)
        van = SocketVan(
            SCHEDULER, DESK_SCHEMA, secret=PUBLIC, run_id=run_id(port), listen=desk_address(port)
        )

        def answer(delivery: Delivery) -> SecretAnswer:
            del delivery
            return SecretAnswer(key)

        self._service = Service(van, {SecretQuestion: answer})
        self._service.start()

    def close(self) -> None:
        """Stop answering requests. Idempotent."""
        self._service.close(0.2)


def run_id(port: int) -> str:
    """Return the name of the job."""
    return f"pslite-{port}"


def desk_address(port: int) -> str:
    """Return the address of the desk: an abstract unix socket, one per user and port."""
    return f"unix:@braid-pslite-{os.geteuid()}-{port}"


def start_by_hand(
    environment: Environment, timeout_s: float = TIMEOUT_S
) -> tuple[kv.KVNode, SecretDesk | None]:
    """Join the job as a node, and wait for all other nodes.

    Returns:
        The node, and the `SecretDesk` to close after the node; None if this process has no desk.

    Raises:
        RendezvousError: The scheduler cannot be reached, or has another secret.
        CommError: All nodes of this role have joined already.
        CommTimeout: Some nodes have not joined.
    """
    desk = None
    if environment.role == SCHEDULER and not (environment.secret_file or environment.insecure):
        desk = SecretDesk(environment.port)
    node = None
    try:
        secret = desk.secret if desk is not None else _secret(environment, timeout_s)
        node = _make_node(environment, secret, timeout_s)
        node.start(timeout_s)
    except BaseException:
        if node is not None:
            node.abort()
        if desk is not None:
            desk.close()
        raise
    return node, desk


def _secret(environment: Environment, timeout_s: float) -> Secret:
    if environment.secret_file:
        return Secret.from_file(environment.secret_file).sealing(wants_frame_codes())
    if environment.insecure:
        return PUBLIC
    port = environment.port
    van = SocketVan(_candidate(), DESK_SCHEMA, secret=PUBLIC, run_id=run_id(port))
    with Service(van) as desk:
        van.connect(SCHEDULER, desk_address(port), timeout_s=timeout_s)
        answer = desk.call(SCHEDULER, SecretQuestion(), timeout_s).message
    assert isinstance(answer, SecretAnswer), "the schema has one answer"
    return Secret(answer.key)


def _make_node(environment: Environment, secret: Secret, timeout_s: float) -> kv.KVNode:
    root = f"tcp://{environment.host}:{environment.port}"
    counts = environment.num_servers, environment.num_workers
    role: Role = "scheduler"
    number, listen = 0, root
    if environment.role != SCHEDULER:
        role = "server" if environment.role == "server" else "worker"
        number = _number(environment, secret, root, timeout_s)
        host = environment.node_host or _host_towards(environment.host, environment.port)
        listen = f"tcp://{host}:0"
    config = replace(
        VAN, heartbeat_s=environment.heartbeat_s, lost_after_s=environment.lost_after_s
    )
    place = NodePlace(role, number, secret, run_id(environment.port), listen)
    van = make_van(
        place,
        SCHEMA,
        config,
        drop=environment.drop,
        listen_anywhere=not environment.is_one_host,
    )
    return kv.KVNode(van, role, number, counts, root, resend_s=environment.resend_s)


def _number(environment: Environment, secret: Secret, root: str, timeout_s: float) -> int:
    """Return this node's number, which the scheduler assigns."""
    van = SocketVan(_candidate(), SCHEMA, secret=secret, run_id=run_id(environment.port))
    with Service(van) as asking:
        van.connect(SCHEDULER, root, timeout_s=timeout_s)
        answer = asking.call(
            SCHEDULER, Candidate(environment.role), timeout_s, retry_s=environment.resend_s
        ).message
    assert isinstance(answer, Numbered), "candidates are numbered"
    return answer.number


def _candidate() -> str:
    return f"candidate:{random.SystemRandom().randrange(10**9)}"


def _host_towards(host: str, port: int) -> str:
    """Return the address of this host on the route to another host."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as exc:
        msg = f"no address of this host reaches {host}: {exc}; set DMLC_NODE_HOST"
        raise ConfigError(msg) from exc
