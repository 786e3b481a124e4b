"""Connections between ranks that do not share memory: each rank calls the far ones before it, and answers those behind.

Both ends prove that they know the job's secret: the launcher's or the user's. Inside of one host, where nobody else can
listen, 32 random bytes that rank 0 puts into the store do as well, so that whoever may join the job there may also join
here; over a network they do only if the user says so.

Before anybody waits, all ranks of several hosts knock at each other's addresses, and if somebody cannot reach somebody, all
raise the same table within some seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from typing import NamedTuple

from braid.errors import CommTimeout, ConfigError, RendezvousError
from braid.transport.meeting import LOOK_S, Meeting
from braid.transport.reach import knock, matrix, own_address_towards
from braid.wire import Address, Identity, Listener, Secret, SocketConnection
from braid.wire import connect as dial

__all__ = ["LOST_AFTER_S", "Call", "Network", "call_all"]

ROLE = "memory"
ANSWER_S = 30.0  # of a rank that has said where it listens
LOST_AFTER_S = 30.0  # of silence of a host


class Network(NamedTuple):
    """How this rank is reached by ranks of other hosts.

    Attributes:
        listen: Own address for them; found by the way to `towards` when empty.
        towards: A host of the job, such as that of the store.
        insecure: Let the secret of the connections travel through the store, as plain text.
    """

    listen: str = ""
    towards: str = ""
    insecure: bool = False


class Call(NamedTuple):
    """A connection that stands.

    Attributes:
        pid: Process id of the peer, on its host.
        host: Name of its host.
        connection: After the handshake.
    """

    pid: int
    host: str
    connection: SocketConnection


class _Said(NamedTuple):
    """What a rank said of itself."""

    pid: int
    host: str
    address: str

    @classmethod
    def parse(cls, text: str) -> _Said:
        pid, host, address = text.split("@")
        return cls(int(pid), host, address)


def call_all(
    meeting: Meeting, hosts: tuple[int, ...], secret: Secret | None, network: Network
) -> dict[int, Call]:
    """Connect to all ranks of other hosts.

    Args:
        meeting: Where all ranks find each other.
        hosts: Number of each rank's host.
        secret: Of the job; None to find one in the store.
        network: See above.

    Raises:
        RendezvousError: Some rank did not answer, cannot be reached or has another secret.
        ConfigError: There is no secret, or no address to listen on.
    """
    me = meeting.rank
    far = [r for r, host in enumerate(hosts) if host != hosts[me]]
    found = secret or _shared_secret(meeting, network)
    who = Identity("job", ROLE, me)
    listen = network.listen or _own_address(network)
    address = str(Address(host=listen, port=0))
    abroad = not Address.parse(address).is_loopback
    with Listener(address, found, who, listen_anywhere=abroad, clock=meeting.clock) as listener:
        own = f"{os.getpid()}@{socket.gethostname()}@{listener.address}"
        said = [_Said.parse(text) for text in meeting.all_say("shm/address", own)]
        if abroad:
            _require_reach(meeting, hosts, said)
        calls: dict[int, SocketConnection] = {}
        with contextlib.ExitStack() as undo:
            for peer in (r for r in far if r < me):
                calls[peer] = _call(meeting, peer, said[peer].address, found, who)
                undo.callback(calls[peer].close)
            while len(calls) < len(far):
                connection = _answer(meeting, listener, [r for r in far if r not in calls])
                peer = connection.peer.rank
                if peer <= me or peer in calls or peer not in far or connection.peer.role != ROLE:
                    connection.close()
                    continue
                calls[peer] = connection
                undo.callback(connection.close)
            undo.pop_all()
    if abroad:
        for connection in calls.values():
            connection.end_if_silent(LOST_AFTER_S)
    return {r: Call(said[r].pid, said[r].host, calls[r]) for r in far}


def _own_address(network: Network) -> str:
    if not network.towards:
        return "127.0.0.1"
    try:
        return own_address_towards(network.towards)
    except OSError as exc:
        msg = (
            f"expected a way from {socket.gethostname()} to {network.towards}, found {exc}: name the address on which this "
            "rank listens with BRAID_LISTEN, or see whether MASTER_ADDR is right"
        )
        raise ConfigError(msg) from exc


def _shared_secret(meeting: Meeting, network: Network) -> Secret:
    """One that all who meet there read."""
    if network.towards and not network.insecure:
        msg = (
            "expected a secret for connections between hosts, found none: start the job with `braid run`, or put 32 random "
            "bytes into a file that only you can read (chmod 600) and name it in BRAID_SECRET_FILE on all hosts, or, on a "
            "network that you trust, set BRAID_INSECURE_NETWORK=1"
        )
        meeting.part()
        raise ConfigError(msg)
    key = "shm/secret"
    if meeting.rank == 0:
        meeting.store.set(key, secrets.token_hex(32).encode())
    meeting.wait([key])
    return Secret(bytes.fromhex(meeting.store.get(key).decode()))


def _require_reach(meeting: Meeting, hosts: tuple[int, ...], said: list[_Said]) -> None:
    """Raise, on all ranks, if some host cannot reach another."""
    far = {r: said[r].address for r in range(len(hosts)) if hosts[r] != hosts[meeting.rank]}
    failed = {str(rank): why for rank, why in knock(far, meeting.clock).items()}
    words = meeting.all_say("shm/reach", json.dumps(failed))
    found: dict[tuple[int, int], str] = {}
    for rank, word in enumerate(words):
        for other, why in json.loads(word).items():
            found.setdefault((hosts[rank], hosts[int(other)]), why)
    if not found:
        return
    firsts = [said[hosts.index(number)] for number in range(max(hosts) + 1)]
    names = [f"{one.host} {Address.parse(one.address).host}" for one in firsts]
    msg = (
        f"expected all {len(names)} hosts to reach each other, found\n{matrix(names, found)}\n"
        "open the ports between them, or name an address on a network that all share with BRAID_LISTEN (or "
        "`braid run --network-interface`)"
    )
    meeting.part()
    raise RendezvousError(msg)


def _call(
    meeting: Meeting, peer: int, address: str, secret: Secret, who: Identity
) -> SocketConnection:
    try:
        timeout_s = min(meeting.timeout_s, ANSWER_S)
        connection = dial(address, secret, who, timeout_s=timeout_s, clock=meeting.clock)
    except RendezvousError:
        meeting.look()  # the launcher may know more
        raise
    if connection.peer.rank != peer:
        connection.close()
        msg = f"expected rank {peer} at {address}, found {connection.peer}: is the store that of another job?"
        raise RendezvousError(msg)
    return connection


def _answer(meeting: Meeting, listener: Listener, missing: list[int]) -> SocketConnection:
    deadline_ns = meeting.clock.now_ns() + round(meeting.timeout_s * 1e9)
    while True:
        left_s = (deadline_ns - meeting.clock.now_ns()) / 1e9
        try:
            return listener.accept(max(0.0, min(left_s, LOOK_S)))
        except CommTimeout as exc:
            meeting.look()
            if left_s <= LOOK_S:
                refused = "".join(f"\n  refused {one}" for one in listener.refusals)
                msg = (
                    f"expected connections from ranks {missing} within {meeting.timeout_s:g} s (this is rank "
                    f"{meeting.rank}), found none: see their errors, or whether they have the job's secret{refused}"
                )
                raise RendezvousError(msg) from exc
