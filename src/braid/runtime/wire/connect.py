"""Connecting to a listener: tries again while no process listens, and proves both identities."""

from __future__ import annotations

import errno
import os
import socket

from braid.errors import RendezvousError
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.wire.address import Address
from braid.runtime.wire.connection import Connection, is_inside_host
from braid.runtime.wire.frames import FrameLimits
from braid.runtime.wire.handshake import (
    NONCE_BYTES,
    Established,
    Handshake,
    Identity,
    Refused,
    SendBytes,
)
from braid.runtime.wire.secret import Secret, one_user_problem, same_user_problem

__all__ = ["connect"]

_RETRY_FIRST_S = 0.005
_RETRY_MOST_S = 0.2


def connect(
    address: str,
    secret: Secret,
    identity: Identity,
    *,
    timeout_s: float,
    limits: FrameLimits | None = None,
    clock: Clock | None = None,
) -> Connection:
    """Connect to a `Listener`, with the handshake; tries again while no process listens.

    Args:
        address: Address of the listener.
        secret: The job's secret.
        identity: Identity of this process; its role is the purpose of the connection.
        timeout_s: Deadline for the connection and the handshake.
        limits: Limits of the frames of the connection.
        clock: Clock for the deadline and the pauses; the host's when None.

    Raises:
        RendezvousError: No process listened until the deadline, or one end refused the other (then
            without a retry).
        ConfigError: `address` or `identity` is invalid.
    """
    where = Address.parse(address)
    if problem := one_user_problem(secret, where):
        msg = f"refused the listener at {address}: {problem}"
        raise RendezvousError(msg)
    clock = clock or MonotonicClock()
    deadline_ns = clock.after_ns(timeout_s)
    pause_s = _RETRY_FIRST_S
    while True:
        try:
            sock = _open(where, deadline_ns, clock)
            try:
                handshake = Handshake(
                    "client",
                    secret,
                    identity,
                    os.urandom(NONCE_BYTES),
                    seals_frames=secret.seals_frames and not is_inside_host(sock),
                )
                peer, keys = _prove(sock, handshake, address, deadline_ns, clock)
                return Connection(sock, peer, limits=limits, keys=keys, clock=clock)
            except BaseException:
                sock.close()
                raise
        except OSError as exc:
            problem = exc.strerror or str(exc) or type(exc).__name__
            if clock.after_ns(pause_s) >= deadline_ns:
                msg = (
                    f"no braid process answered at {address} within {timeout_s:g} s: {problem}; "
                    f"check that it runs and that {identity} can reach it"
                )
                raise RendezvousError(msg) from exc
        clock.sleep(pause_s)
        pause_s = min(2 * pause_s, _RETRY_MOST_S)


def _open(where: Address, deadline_ns: int, clock: Clock) -> socket.socket:
    family, target = where.resolve()
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(_remaining_s(deadline_ns, clock))
        sock.connect(target)
        if not where.is_unix and sock.getsockname() == sock.getpeername():
            # Linux may connect a loopback port to itself, if the system chose the same port.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        problem = same_user_problem(sock)
        if problem is not None:
            msg = f"refused the listener at {where}: {problem}"
            raise RendezvousError(msg)
    except BaseException:
        sock.close()
        raise
    return sock


def _prove(
    sock: socket.socket, handshake: Handshake, address: str, deadline_ns: int, clock: Clock
) -> Established:
    """Run the client's side of a handshake; raises OSError if another attempt may succeed."""
    instructions = handshake.start()
    established: Established | None = None
    while True:
        for instruction in instructions:
            if isinstance(instruction, SendBytes):
                sock.sendall(instruction.data)
            elif isinstance(instruction, Refused):
                msg = f"handshake with {address} failed: {instruction.reason}"
                raise RendezvousError(msg)
            else:
                established = instruction
        if established is not None:
            return established
        sock.settimeout(_remaining_s(deadline_ns, clock))
        data = sock.recv(handshake.needs)
        if not data:
            reason = "the listener closed the connection during the handshake"
            raise ConnectionResetError(errno.ECONNRESET, reason)
        instructions = handshake.feed(data)


def _remaining_s(deadline_ns: int, clock: Clock) -> float:
    """Return the seconds until the deadline; never 0, which would mean non-blocking."""
    return max(1e-3, (deadline_ns - clock.now_ns()) / 1e9)
