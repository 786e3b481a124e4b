"""Trying to reach other hosts: which of their addresses lead to them, and why the others do not.

Problem: that something accepts a connection proves nothing: every host has a container bridge at
172.17.0.1, and connects to its own. Idea: whoever answers proves with the job's secret which host
it is; all addresses are tried at once, and each is given its reason.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from braid.clock import Clock
from braid.diagnose import why_unreachable
from braid.errors import ConfigError
from braid.launch.cluster.reachability import Attempt, Endpoint
from braid.launch.process.interfaces import Interface
from braid.wire import Address, Established, Handshake, Identity, Listener, Secret
from braid.wire import Send as SendBytes

__all__ = ["ProbeListener", "Prober"]

PROBE_ROLE = "probe"
NONCE_BYTES = 32
AGAIN_NS = 200_000_000  # a listener that is busy closes the connection and is worth another try
FINAL = {"no route", "timed out"}  # the system has tried for long enough


class ProbeListener:
    """Listens on each address of this host, so that others can find out which of them lead here.

    Args:
        node: Number of this host.
        found: Its addresses; those that cannot be bound are left out.
        run_id: Name of the run.
        secret: The job's.
        clock: Time source.
    """

    def __init__(
        self, node: int, found: Iterable[Interface], run_id: str, secret: Secret, clock: Clock
    ) -> None:
        self.endpoints: list[Endpoint] = []
        self._clock = clock
        self._listeners: list[Listener] = []
        self._selector: selectors.BaseSelector | None = None
        identity = Identity(run_id, PROBE_ROLE, node)
        for name, ip, prefix in found:
            try:
                address = str(Address(host=ip))
                listener = Listener(address, secret, identity, listen_anywhere=True, clock=clock)
            except ConfigError:  # an address that is being set up, say: it leads nowhere
                continue
            port = Address.parse(listener.address).port
            self._listeners.append(listener)
            self.endpoints.append(Endpoint(node, name, ip, prefix, port))

    def register(self, selector: selectors.BaseSelector) -> None:
        """Be watched by `selector` from now on, whose keys' data is what to call."""
        self._selector = selector
        for listener in self._listeners:
            selector.register(listener, selectors.EVENT_READ, self.poll)

    @property
    def deadline_ns(self) -> int | None:
        """When `poll` is due though nothing is readable."""
        due = [listener.next_deadline_ns() for listener in self._listeners]
        return min((ns for ns in due if ns is not None), default=None)

    def poll(self) -> None:
        """Answer who has come."""
        for listener in self._listeners:
            for connection in listener.accept_ready():
                connection.close()  # it knows now

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            if self._selector is not None:
                self._selector.unregister(listener)
            listener.close()


class Prober:
    """Tries to reach addresses, all at once.

    Args:
        node: Number of this host.
        targets: What to reach.
        run_id: Name of the run.
        secret: The job's.
        limit_s: How long to try.
        clock: Time source.
        selector: Watches the attempts; the data of its keys is what to call.
    """

    def __init__(
        self,
        node: int,
        targets: Sequence[Endpoint],
        run_id: str,
        secret: Secret,
        *,
        limit_s: float,
        clock: Clock,
        selector: selectors.BaseSelector,
    ) -> None:
        self.deadline_ns = clock.now_ns() + round(limit_s * 1e9)
        self._results: dict[Endpoint, str] = {}
        self._tries = [
            _Try(target, Identity(run_id, PROBE_ROLE, node), secret, clock, selector)
            for target in targets
        ]
        self._node = node
        self._clock = clock

    @property
    def next_ns(self) -> int:
        """When `poll` is due."""
        again = [t.again_ns for t in self._tries if t.again_ns is not None]
        return min([self.deadline_ns, *again])

    def poll(self) -> list[Attempt] | None:
        """Do what is due; all results once there are all."""
        now_ns = self._clock.now_ns()
        over = now_ns >= self.deadline_ns
        for attempt in self._tries:
            if attempt.again_ns is not None and now_ns >= attempt.again_ns and not over:
                attempt.begin()
        if not over and any(attempt.result is None for attempt in self._tries):
            return None
        self.close()
        return [
            Attempt(
                self._node, t.target.node, t.target.ip, t.last if t.result is None else t.result
            )
            for t in self._tries
        ]

    def close(self) -> None:
        """Stop trying. Idempotent."""
        for attempt in self._tries:
            attempt.end()


class _Try:
    """One address. `result` is empty when it was reached, None while it is open; `last` is why not yet."""

    def __init__(
        self,
        target: Endpoint,
        identity: Identity,
        secret: Secret,
        clock: Clock,
        selector: selectors.BaseSelector,
    ) -> None:
        self.target = target
        self.result: str | None = None
        self.last = "timed out"
        self.again_ns: int | None = None
        self._identity = identity
        self._secret = secret
        self._clock = clock
        self._selector = selector
        self._socket: socket.socket | None = None
        self._handshake: Handshake | None = None
        self.begin()

    def begin(self) -> None:
        """Connect, without waiting."""
        self.again_ns = None
        with ExitStack() as undo:
            try:
                family, where = Address(host=self.target.ip, port=self.target.port).resolve()
                self._socket = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                self._socket.setblocking(False)
                problem = self._socket.connect_ex(where)
                if problem not in {0, errno.EINPROGRESS}:
                    raise OSError(problem, os.strerror(problem))
            except OSError as exc:
                self._socket = None
                self._not_now(exc)
                return
            undo.pop_all()
        self._handshake = Handshake("client", self._secret, self._identity, os.urandom(NONCE_BYTES))
        self._selector.register(self._socket, selectors.EVENT_WRITE, self._connected)

    def end(self) -> None:
        """Close the socket. Idempotent."""
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def _connected(self) -> None:
        sock, handshake = self._socket, self._handshake
        assert sock is not None
        assert handshake is not None
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            self._not_now(OSError(problem, os.strerror(problem)))
            return
        self._selector.modify(sock, selectors.EVENT_READ, self._readable)
        try:
            self._execute(handshake.start())
        except OSError as exc:  # a listener that is busy may have closed it already
            self._not_now(exc)

    def _readable(self) -> None:
        sock, handshake = self._socket, self._handshake
        assert sock is not None
        assert handshake is not None
        try:
            data = sock.recv(handshake.needs)
            if not data:
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            self._execute(handshake.feed(data))
        except BlockingIOError:
            return
        except OSError as exc:
            self._not_now(exc)

    def _execute(self, instructions: Iterable[object]) -> None:
        for instruction in instructions:
            if isinstance(instruction, SendBytes):
                assert self._socket is not None
                self._socket.send(instruction.data)  # one small frame on a fresh socket
            elif isinstance(instruction, Established):
                right = instruction.peer.rank == self.target.node
                self._conclude("" if right else "another host answers at this address")
            else:
                self._conclude("another program answers at this address")

    def _not_now(self, exc: OSError) -> None:
        """Note the reason; what may pass is tried again until the deadline."""
        self.end()
        why = why_unreachable(exc.errno or 0)
        if why in FINAL:
            self._conclude(why)
        else:
            self.last = why if why == "refused" else f"refused: {why}"
            self.again_ns = self._clock.now_ns() + AGAIN_NS

    def _conclude(self, reason: str) -> None:
        self.end()
        self.result = reason
