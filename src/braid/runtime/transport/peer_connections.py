"""Connections between ranks that do not share memory.

Each rank connects to the remote ranks with smaller numbers and accepts connections of the others.
Both ends prove that they know the job's secret, which comes from the launcher or from the user.
Without a secret, ranks of one host connect by unix sockets, where the system confirms that both
ends belong to the same user; 32 random bytes that rank 0 puts into the store identify the job. Over
a network these bytes are used as the secret only if the user permits it. Several jobs of one user
may share a secret file, so both ends also name their job, by a random word that rank 0 has put into
the store.

Before connections are made, one rank of each host tries the addresses of all other hosts. If some
host cannot reach another, all ranks raise the same table of these within seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
from typing import NamedTuple

from braid.errors import BraidError, CommTimeout, ConfigError, RendezvousError
from braid.runtime.diagnose.reach_table import reach_table
from braid.runtime.store.exchange import LOOK_S
from braid.runtime.transport.meeting import Meeting
from braid.runtime.transport.reachability import own_address_towards, probe
from braid.runtime.wire import Address, Connection, Identity, Listener, Secret, local_address
from braid.runtime.wire import connect as dial

__all__ = ["Network", "call_all"]

ROLE = "memory"
ANSWER_S = 30.0  # time-out for a connection to a rank that has published its address
OUTWARDS = "192.0.2.1"  # reserved for documentation; packets to it use the default route


class Network(NamedTuple):
    """Addresses at which ranks of other hosts reach this rank, and whether to trust the network.

    Attributes:
        listen: Address to listen on; when empty, the address from which this host reaches
            `towards`.
        towards: A host of the job, such as the host of the store.
        insecure: Whether the secret of the connections may be in the store as plain text.
        seals_frames: Whether frames between hosts carry message authentication codes.
        one_host: Whether all ranks are on this host.
    """

    listen: str = ""
    towards: str = ""
    insecure: bool = False
    seals_frames: bool = True
    one_host: bool = False


class PeerConnection(NamedTuple):
    """A connection to one peer, after the handshake.

    Attributes:
        pid: Process id of the peer, on the peer's host.
        host: Name of the peer's host.
        over_network: Whether the peer is on another host.
        connection: The authenticated connection.
    """

    pid: int
    host: str
    over_network: bool
    connection: Connection


class _Endpoint(NamedTuple):
    """Process id, host and address that a rank has published for the others."""

    pid: int
    host: str
    address: str

    @classmethod
    def parse(cls, text: str) -> _Endpoint:
        pid, host, address = text.split("@", 2)
        return cls(int(pid), host, address)


def call_all(
    meeting: Meeting, hosts: tuple[int, ...], secret: Secret | None, network: Network
) -> dict[int, PeerConnection]:
    """Connect to all ranks of other hosts; return the connections by rank.

    Args:
        meeting: Meeting of all ranks in the store.
        hosts: Number of each rank's host.
        secret: The job's secret; None to agree on one through the store.
        network: Addresses for ranks of other hosts.

    Raises:
        RendezvousError: Some rank did not answer, cannot be reached or has another secret.
        ConfigError: There is no secret, or no address to listen on.
    """
    me = meeting.rank
    remote = [r for r, host in enumerate(hosts) if host != hosts[me]]
    job_secret, job = _agree_on_secret(meeting, secret, network)
    who = Identity(job, ROLE, me)
    with contextlib.ExitStack() as stack:
        try:
            wanted = _place_to_listen(job_secret, network)
            listener = stack.enter_context(
                Listener(
                    wanted,
                    job_secret,
                    who,
                    listen_anywhere=not Address.parse(wanted).is_loopback,
                    clock=meeting.clock,
                )
            )
        except BraidError as exc:
            _gather_addresses(meeting, f"!{exc}")  # raises, on all ranks
            raise
        text = f"{os.getpid()}@{socket.gethostname()}@{listener.address}"
        words = _gather_addresses(meeting, text)
        if me == 0:  # all ranks have read the secret
            meeting.store.delete_key("shm/secret/0")
        ends = [_Endpoint.parse(word) for word in words]
        over_network = _require_one_network(meeting, ends)
        if over_network:
            _require_reach(meeting, hosts, ends)
        calls: dict[int, Connection] = {}
        with contextlib.ExitStack() as undo:
            for peer in (r for r in remote if r < me):
                calls[peer] = _call(meeting, peer, ends[peer].address, job_secret, who)
                undo.callback(calls[peer].close)
            while len(calls) < len(remote):
                connection = _answer(meeting, listener, [r for r in remote if r not in calls])
                peer = connection.peer.rank
                if (
                    peer <= me
                    or peer in calls
                    or peer not in remote
                    or connection.peer.role != ROLE
                ):
                    connection.close()
                    continue
                calls[peer] = connection
                undo.callback(connection.close)
            undo.pop_all()
    if over_network:
        for connection in calls.values():
            connection.end_if_silent()
    return {r: PeerConnection(ends[r].pid, ends[r].host, over_network, calls[r]) for r in remote}


def _gather_addresses(meeting: Meeting, text: str) -> list[str]:
    """Publish a text to all ranks and return their texts.

    A text that begins with `!` is the error of its rank; then all ranks raise an error.
    """
    texts = meeting.gather("shm/address", text)
    wrong = [f"  rank {r}: {word[1:]}" for r, word in enumerate(texts) if word.startswith("!")]
    if wrong:
        meeting.part()
        table = "\n".join(wrong)
        msg = f"not every rank can listen for ranks of other hosts:\n{table}"
        raise ConfigError(msg)
    return texts


def _place_to_listen(secret: Secret, network: Network) -> str:
    if secret.for_one_user:
        return local_address(ROLE)
    return str(Address(host=network.listen or own_address(network), port=0))


def own_address(network: Network) -> str:
    """Return the address of this host on the network of a job.

    Raises:
        ConfigError: There is no route to that network.
    """
    if not network.towards:
        return "127.0.0.1"
    try:
        address = own_address_towards(network.towards)
        named = not Address(host=network.towards).is_loopback
        if named and Address(host=address).is_loopback:  # this host's name, as in /etc/hosts
            address = own_address_towards(OUTWARDS)
    except OSError as exc:
        msg = (
            f"{socket.gethostname()} has no route to {network.towards} ({exc}): name the "
            "address on which this rank listens with BRAID_LISTEN, or see whether MASTER_ADDR "
            "is right"
        )
        raise ConfigError(msg) from exc
    return address


def _agree_on_secret(
    meeting: Meeting, secret: Secret | None, network: Network
) -> tuple[Secret, str]:
    """Return a secret (the job's, or the store's if every rank permits it) and the job's name."""
    trusts = not network.towards or network.insecure
    kind = "own" if secret else "store" if trusts else "none"
    words = meeting.gather("shm/trust", f"{kind}@{secrets.token_hex(8)}")
    kinds, drawn = zip(*(word.split("@") for word in words), strict=True)
    job = drawn[0]
    if "none" in kinds or len(set(kinds)) > 1:
        meeting.part()
        descriptions = {"own": "has a secret", "store": "trusts the store", "none": "has no secret"}
        table = "\n".join(f"  rank {r} {descriptions[kind]}" for r, kind in enumerate(kinds))
        msg = (
            "ranks have no secret for connections between hosts, or not all in the same way:\n"
            f"{table}\n"
            "start the job with `braid run`, or put 32 random bytes into a file that only you "
            "can read (chmod 600) and name it in BRAID_SECRET_FILE on all hosts, or, on a "
            "network that you trust, set BRAID_INSECURE_NETWORK=1 on all"
        )
        raise ConfigError(msg)
    if secret is not None:
        return secret, job
    made = secrets.token_hex(32) if meeting.rank == 0 else ""
    key = bytes.fromhex(meeting.gather("shm/secret", made)[0])
    # only Linux identifies the user at the other end; elsewhere the store is trusted
    for_one_user = network.one_host and sys.platform == "linux"
    return Secret(key, seals_frames=network.seals_frames, for_one_user=for_one_user), job


def _require_one_network(meeting: Meeting, ends: list[_Endpoint]) -> bool:
    """Return whether ranks listen on a network.

    If only some listen on a network, and others on the loopback address, all ranks raise an error.
    """
    inside = [r for r, one in enumerate(ends) if Address.parse(one.address).is_loopback]
    if inside and len(inside) < len(ends):
        meeting.part()
        table = "\n".join(f"  rank {r} on {one.host}: {one.address}" for r, one in enumerate(ends))
        msg = (
            "other hosts cannot reach some of the addresses on which ranks "
            f"listen:\n{table}\nset BRAID_LISTEN to a reachable address on ranks {inside}, or "
            "check in /etc/hosts why MASTER_ADDR resolves to a loopback address there"
        )
        raise ConfigError(msg)
    return not inside


def _require_reach(meeting: Meeting, hosts: tuple[int, ...], ends: list[_Endpoint]) -> None:
    """Raise on all ranks if some host cannot reach another."""
    mine = hosts[meeting.rank]
    # one rank of a host probes; no rank accepts a connection before the meeting is over
    first = hosts.index(mine) == meeting.rank
    remote = {r: ends[r].address for r in range(len(hosts)) if first and hosts[r] != mine}
    failed = {str(rank): why for rank, why in probe(remote, meeting.clock).items()}
    words = meeting.gather("shm/reach", json.dumps(failed))
    failures: dict[tuple[int, int], str] = {}
    for rank, word in enumerate(words):
        for other, why in json.loads(word).items():
            failures.setdefault((hosts[rank], hosts[int(other)]), why)
    if not failures:
        return
    firsts = [ends[hosts.index(number)] for number in range(max(hosts) + 1)]
    names = [f"{one.host} {Address.parse(one.address).host}" for one in firsts]
    msg = (
        f"some of the {len(names)} hosts cannot reach each other:\n"
        f"{reach_table(names, failures)}\n"
        "open the ports between them in both directions, or name an address on a network that "
        "all share with BRAID_LISTEN (or `braid run --network-interface`)"
    )
    meeting.part()
    raise RendezvousError(msg)


def _call(meeting: Meeting, peer: int, address: str, secret: Secret, who: Identity) -> Connection:
    try:
        timeout_s = min(meeting.timeout_s, ANSWER_S)
        connection = dial(address, secret, who, timeout_s=timeout_s, clock=meeting.clock)
    except RendezvousError:
        meeting.look()  # the launcher may know the cause
        raise
    if connection.peer.rank != peer:
        connection.close()
        msg = (
            f"{connection.peer} answers at {address} instead of rank {peer}: use a new store, "
            "this one may belong to another job"
        )
        raise RendezvousError(msg)
    return connection


def _answer(meeting: Meeting, listener: Listener, missing: list[int]) -> Connection:
    deadline_ns = meeting.clock.after_ns(meeting.timeout_s)
    while True:
        left_s = (deadline_ns - meeting.clock.now_ns()) / 1e9
        try:
            return listener.accept(max(0.0, min(left_s, LOOK_S)))
        except CommTimeout as exc:
            meeting.look()
            if left_s <= LOOK_S:
                refused = "".join(f"\n  refused {one}" for one in listener.refusals)
                msg = (
                    f"ranks {missing} did not connect to rank {meeting.rank} within "
                    f"{meeting.timeout_s:g} s: see their errors, and check that they have the "
                    f"job's secret{refused}"
                )
                raise RendezvousError(msg) from exc
