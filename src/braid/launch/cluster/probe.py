"""Probes the addresses of other hosts: which of them work, and why any other does not.

Problem: an accepted connection proves nothing. Every host has a container bridge at 172.17.0.1 and
would connect to its own.

Idea: the answering host proves its identity with the job's secret. All addresses are tried at the
same time, and each result has a reason.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from braid.errors import ConfigError
from braid.launch.cluster.reachability import Attempt, Endpoint
from braid.runtime.clock import Clock
from braid.runtime.diagnose.reach_table import why_unreachable
from braid.runtime.rendezvous.interfaces import Interface
from braid.runtime.wire import (
    Address,
    Established,
    Handshake,
    Identity,
    Listener,
    Secret,
    SendBytes,
)

__all__ = ["ProbeListener", "Prober"]

PROBE_ROLE = "probe"
NONCE_BYTES = 32
AGAIN_NS = 200_000_000  # until the next attempt: a busy listener closes connections
FINAL = {"no route", "timed out"}  # reasons after which another attempt is useless


class ProbeListener:
    """Answers probes on each address of this host.

    Args:
        node: Number of this host.
        addresses: Addresses of this host; addresses that cannot be bound are left out.
        run_id: Name of the run.
        secret: Secret of the job.
        clock: Time source.

    Attributes:
        endpoints: Addresses and ports of the listener.
    """

    def __init__(
        self, node: int, addresses: Iterable[Interface], run_id: str, secret: Secret, clock: Clock
    ) -> None:
        self.endpoints: list[Endpoint] = []
        self._clock = clock
        self._listeners: list[Listener] = []
        self._selector: selectors.BaseSelector | None = None
        identity = Identity(run_id, PROBE_ROLE, node)
        for name, ip, prefix in addresses:
            try:
                address = str(Address(host=ip))
                listener = Listener(address, secret, identity, listen_anywhere=True, clock=clock)
            except ConfigError:  # for example an address that is being configured
                continue
            port = Address.parse(listener.address).port
            self._listeners.append(listener)
            self.endpoints.append(Endpoint(node, name, ip, prefix, port))

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register with `selector`; the data of a key is the function to call."""
        self._selector = selector
        for listener in self._listeners:
            selector.register(listener, selectors.EVENT_READ, self.poll)

    @property
    def deadline_ns(self) -> int | None:
        """Time at which `poll` is due even if no descriptor is readable."""
        due = [listener.next_deadline_ns() for listener in self._listeners]
        return min((ns for ns in due if ns is not None), default=None)

    def poll(self) -> None:
        """Answer the probes that have arrived."""
        for listener in self._listeners:
            for connection in listener.accept_ready():
                connection.close()  # the handshake was the answer

    def close(self) -> None:
        """Stop answering. Idempotent."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            if self._selector is not None:
                self._selector.unregister(listener)
            listener.close()


class Prober:
    """Tries to reach endpoints, all at the same time.

    Args:
        node: Number of this host.
        targets: Endpoints to reach.
        run_id: Name of the run.
        secret: Secret of the job.
        limit_s: Time limit in seconds.
        clock: Time source.
        selector: Selector that polls the sockets; the data of a key is the function to call.

    Attributes:
        deadline_ns: Time at which the attempts end.
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
        self.deadline_ns = clock.after_ns(limit_s)
        self._results: dict[Endpoint, str] = {}
        self._tries = [
            _Try(target, Identity(run_id, PROBE_ROLE, node), secret, clock, selector)
            for target in targets
        ]
        self._node = node
        self._clock = clock

    @property
    def next_ns(self) -> int:
        """Time at which `poll` is due."""
        again = [t.again_ns for t in self._tries if t.again_ns is not None]
        return min([self.deadline_ns, *again])

    def poll(self) -> list[Attempt] | None:
        """Make the attempts that are due; return all results once they are complete, else None."""
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
        """Stop all attempts. Idempotent."""
        for attempt in self._tries:
            attempt.end()


class _Try:
    """Attempts to reach one endpoint.

    Attributes:
        target: Endpoint to reach.
        result: Reason of the failure; empty after success, None while undecided.
        last: Reason of the last failure that may pass.
        again_ns: Time of the next attempt; None while one is under way.
    """

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
        """Begin to connect, without blocking."""
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
        except OSError as exc:  # a busy listener may have closed the connection already
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
        """Record the reason of a failure, and plan another attempt unless the failure is final."""
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
