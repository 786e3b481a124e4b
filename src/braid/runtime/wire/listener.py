"""Accepting: sockets become connections once both ends have proven their identity.

Problem: with `accept()` followed by a blocking handshake, one silent client blocks all others, and
a server that listens on all interfaces is found by port scanners.

Idea: by default the listener binds the loopback address. It runs all handshakes together in one
selector, each with a deadline, and limits their number. It has no thread: `accept()` waits, or an
event loop polls `fileno()` and calls `accept_ready()`. Unix sockets also need the same user.

Unknown clients cannot delay others. One turn accepts a limited number of clients, so that an event
loop can do its other work. Clients of one address that send nothing may hold only a few of the
places for handshakes. If all places are taken, the oldest client of the address with the most
clients is dropped, silent ones first; an honest client needs its place only for a short time.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections import Counter, deque
from pathlib import Path
from typing import NamedTuple

from braid.errors import CommTimeout, ConfigError, StaleError
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.closing import Closing
from braid.runtime.wire.address import Address
from braid.runtime.wire.connection import Connection, is_inside_host
from braid.runtime.wire.frames import FrameLimits
from braid.runtime.wire.handshake import (
    NONCE_BYTES,
    Established,
    Handshake,
    Identity,
    SendBytes,
)
from braid.runtime.wire.secret import Secret, one_user_problem, same_user_problem

__all__ = ["MAX_ACCEPTS", "MAX_HALF_OPEN", "MAX_SILENT", "Listener"]

HANDSHAKE_LIMIT_S = 5.0
MAX_HALF_OPEN = 64
MAX_SILENT = 16  # clients of one address that have sent no data yet
MAX_ACCEPTS = 64  # in one turn of an event loop: about a millisecond
_BACKLOG = 4096  # all hosts of a job may connect together; the system may allow less
_PAUSE_NS = 100_000_000  # if no descriptor is free; clients wait in the backlog meanwhile
_KEPT_REFUSALS = 16


class _HalfOpen(NamedTuple):
    """A client during its handshake."""

    sock: socket.socket
    handshake: Handshake
    deadline_ns: int
    origin: str
    host: str


class Listener(Closing):
    """A listening socket that returns authenticated connections; for one thread at a time.

    Args:
        address: Address to listen on; port 0 lets the system choose, see `address`.
        secret: The job's secret.
        identity: Identity of this process for the clients.
        listen_anywhere: Whether to allow an address that other hosts can reach.
        limits: Limits of the frames of all connections.
        clock: Clock for deadlines; the host's when None.

    Raises:
        ConfigError: The address cannot be used: it is in use, not of this host, or reachable from
            other hosts without `listen_anywhere`.
    """

    def __init__(
        self,
        address: str,
        secret: Secret,
        identity: Identity,
        *,
        listen_anywhere: bool = False,
        limits: FrameLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        wanted = Address.parse(address)
        if not wanted.is_loopback and not listen_anywhere:
            msg = (
                f"other hosts may reach {address}: listen on 127.0.0.1, or pass "
                "listen_anywhere=True (`--listen ADDR`) to allow it"
            )
            raise ConfigError(msg)
        if problem := one_user_problem(secret, wanted):
            msg = f"cannot listen on {address}: {problem}"
            raise ConfigError(msg)
        Handshake("server", secret, identity, bytes(NONCE_BYTES))  # raises if `identity` is invalid
        self._secret = secret
        self._identity = identity
        self._limits = limits
        self._clock = clock or MonotonicClock()
        self._half_open: dict[int, _HalfOpen] = {}
        self._silent: set[int] = set()  # half-open clients that have sent no data yet
        self._accepted: deque[Connection] = deque()
        self._refusals: deque[str] = deque(maxlen=_KEPT_REFUSALS)
        self._pause_until_ns: int | None = None
        self._socket = _bind(wanted)
        self._address = wanted
        if not wanted.is_unix:
            self._address = wanted._replace(port=self._socket.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    @property
    def address(self) -> str:
        """Address of the listener, with the real port."""
        return str(self._address)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Reasons for which the last clients were refused, newest last."""
        return tuple(self._refusals)

    def fileno(self) -> int:
        """Descriptor for another selector; when readable, call `accept_ready`."""
        return self._selector.fileno()

    def next_deadline_ns(self) -> int | None:
        """Time at which to call `accept_ready` even if no descriptor is readable.

        At this time a client's deadline passes, or a pause ends. None if neither is pending.
        """
        if not self._half_open:
            return self._pause_until_ns
        due = [half.deadline_ns for half in self._half_open.values()]
        if self._pause_until_ns is not None:
            due.append(self._pause_until_ns)
        return min(due, default=None)

    def accept_ready(self) -> list[Connection]:
        """Advance all handshakes without waiting; returns the connections that are complete."""
        self._advance(0.0)
        ready = list(self._accepted)
        self._accepted.clear()
        return ready

    def accept(self, timeout_s: float) -> Connection:
        """Wait for the next client that proves its identity.

        Raises:
            CommTimeout: No client did within `timeout_s`; the message lists the refused clients.
            StaleError: The listener is closed.
        """
        deadline_ns = self._clock.after_ns(timeout_s)
        while not self._accepted:
            now_ns = self._clock.now_ns()
            overdue_ns = self.next_deadline_ns()
            until_ns = deadline_ns if overdue_ns is None else min(deadline_ns, overdue_ns)
            self._advance(max(0, until_ns - now_ns) / 1e9)
            if not self._accepted and now_ns >= deadline_ns:
                refused = "; ".join(self._refusals) or "no client was refused"
                msg = (
                    f"no client connected to {self.address} within {timeout_s:g} s ({refused}; "
                    f"{len(self._half_open)} in their handshake): does it run and reach this host?"
                )
                raise CommTimeout(msg)
        return self._accepted.popleft()

    def close(self) -> None:
        """Stop listening; connections that were returned stay open. Idempotent."""
        if self._socket.fileno() < 0:
            return
        for half in list(self._half_open.values()):
            self._drop(half, None)
        while self._accepted:
            self._accepted.popleft().close()
        self._selector.close()
        self._socket.close()
        path = self._address.path
        if path.startswith("/"):
            Path(path).unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"<Listener {self.address} as {self._identity}, {len(self._half_open)} half open>"

    def _advance(self, timeout_s: float) -> None:
        if self._socket.fileno() < 0:
            msg = f"the listener on {self.address} is closed: open a new one"
            raise StaleError(msg)
        for key, _ in self._selector.select(timeout_s):
            half = self._half_open.get(key.fd)
            if half is not None:
                self._read(half)
        now_ns = self._clock.now_ns()
        for half in [half for half in self._half_open.values() if half.deadline_ns <= now_ns]:
            self._drop(half, f"it was silent during the handshake (limit {HANDSHAKE_LIMIT_S:g} s)")
        self._admit()  # last, after the timed-out clients have left their places

    def _admit(self) -> None:
        if self._is_pausing():
            return
        for _ in range(MAX_ACCEPTS):  # the rest wait for the next turn
            try:
                sock, origin = self._socket.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # the client has closed its connection already
                continue
            except OSError as exc:  # no free descriptor, or no memory
                self._pause(exc)
                return
            where = str(origin or "this host")
            problem = same_user_problem(sock)
            if problem is not None:
                self._refusals.append(f"{where}: {problem}")
                sock.close()
                continue
            if len(self._half_open) >= MAX_HALF_OPEN:
                self._make_room()
            host = origin[0] if isinstance(origin, tuple) else "this host"
            self._begin(sock, where, host)

    def _begin(self, sock: socket.socket, where: str, host: str) -> None:
        """Begin the handshake with a client."""
        sock.setblocking(False)
        nonce = os.urandom(NONCE_BYTES)
        seals_frames = self._secret.seals_frames and not is_inside_host(sock)
        handshake = Handshake(
            "server", self._secret, self._identity, nonce, seals_frames=seals_frames
        )
        handshake.start()
        deadline_ns = self._clock.after_ns(HANDSHAKE_LIMIT_S)
        half = _HalfOpen(sock, handshake, deadline_ns, where, host)
        fd = sock.fileno()
        self._half_open[fd] = half
        self._silent.add(fd)
        self._selector.register(sock, selectors.EVENT_READ)
        self._read(half)  # often its first frame has already arrived
        silent = [h for h in self._half_open.values() if h.host == host and self._is_silent(h)]
        if len(silent) > MAX_SILENT:
            self._drop(silent[0], f"{MAX_SILENT} later clients of {host} were silent, too")

    def _make_room(self) -> None:
        """Drop the oldest client of the address with the most clients; silent ones first."""
        clients = list(self._half_open.values())  # oldest first
        num = Counter(half.host for half in clients)
        crowd = [half for half in clients if num[half.host] == max(num.values())]
        oldest = next(filter(self._is_silent, crowd), crowd[0])
        # an honest client tries again until its deadline
        self._drop(oldest, f"{MAX_HALF_OPEN} clients were in their handshake at once")

    def _is_silent(self, half: _HalfOpen) -> bool:
        return half.sock.fileno() in self._silent

    def _pause(self, exc: OSError) -> None:
        """Stop polling the socket for a moment: it stays readable, so polling would not sleep."""
        self._refusals.append(f"accept failed: {exc.strerror}")
        self._selector.unregister(self._socket)
        self._pause_until_ns = self._clock.now_ns() + _PAUSE_NS

    def _is_pausing(self) -> bool:
        """Return whether the listener pauses; ends a pause that is over."""
        if self._pause_until_ns is None:
            return False
        if self._clock.now_ns() < self._pause_until_ns:
            return True
        self._pause_until_ns = None
        self._selector.register(self._socket, selectors.EVENT_READ)
        return False

    def _read(self, half: _HalfOpen) -> None:
        try:
            while half.handshake.needs:
                data = half.sock.recv(half.handshake.needs)
                if not data:
                    # A client that sent nothing only tested whether it can reach this address.
                    is_probe = self._is_silent(half)
                    reason = "it closed the connection during the handshake"
                    self._drop(half, None if is_probe else reason)
                    return
                self._silent.discard(half.sock.fileno())
                for instruction in half.handshake.feed(data):
                    if isinstance(instruction, SendBytes):
                        # One small frame on a new socket: it is sent whole, or the socket fails.
                        half.sock.send(instruction.data)
                    elif isinstance(instruction, Established):
                        self._forget(half)
                        self._accepted.append(
                            Connection(
                                half.sock,
                                instruction.peer,
                                limits=self._limits,
                                keys=instruction.keys,
                                clock=self._clock,
                            )
                        )
                    else:
                        self._drop(half, instruction.reason)
        except BlockingIOError:
            return
        except OSError as exc:
            self._drop(half, f"the connection failed during the handshake ({exc.strerror})")

    def _forget(self, half: _HalfOpen) -> None:
        self._selector.unregister(half.sock)
        del self._half_open[half.sock.fileno()]
        self._silent.discard(half.sock.fileno())

    def _drop(self, half: _HalfOpen, why: str | None) -> None:
        self._forget(half)
        half.sock.close()
        if why is not None:
            self._refusals.append(f"{half.origin}: {why}")


def _bind(address: Address) -> socket.socket:
    try:
        family, where = address.resolve()
        _remove_stale(address)
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        msg = f"cannot listen on {address}: {exc.strerror}; use an address of this host"
        raise ConfigError(msg) from exc
    try:
        if not address.is_unix:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        if address.path.startswith("/"):
            Path(address.path).chmod(0o600)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as exc:
        sock.close()
        advice = "use an address of this host"
        if exc.errno == errno.EADDRINUSE:
            advice = "end the process that listens there, or let the system choose with port 0"
            if address.is_unix:
                advice = "end the process that listens there, or use another name"
        msg = f"cannot listen on {address}: {exc.strerror}; {advice}"
        raise ConfigError(msg) from exc
    return sock


def _remove_stale(address: Address) -> None:
    """Remove the socket file of a listener that was killed."""
    path = Path(address.path)
    if not address.path.startswith("/") or not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
