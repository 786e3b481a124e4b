"""The server of a store: one thread that waits for requests of all clients.

It owns the connections that other code has accepted and authenticated (`serve`), or a listener
(`listen`). It never blocks on a client: replies that a client does not read stay in its outbox, and
a client with too large an outbox is dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import threading
from collections import deque
from collections.abc import Iterable

from braid.errors import CommError, ConfigError, StaleError
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.closing import Closing
from braid.runtime.store.protocol import STORE_LIMITS, STORE_ROLE, StoreResult, pack, unpack_call
from braid.runtime.store.store_state import AddressedReply, Refusal, StoreState
from braid.runtime.wire import Connection, Identity, Listener, Secret

__all__ = ["StoreServer"]

_MAX_OUTBOX_BYTES = 2 * STORE_LIMITS.max_frame_bytes
_REQUESTS_PER_TURN = 32  # of one client, before other clients have their turn


class StoreServer(Closing):
    """Serves one store to any number of clients, in a separate thread until it is closed.

    Args:
        clock: Clock for the deadlines of waiting requests; the host's when None.
        listener: Listener to which clients connect; owned and closed by the server. None if
            connections are passed to `serve`.

    On failure: the server drops a client that dies or violates the protocol, and its waiting
    requests; its keys stay.
    """

    def __init__(self, *, clock: Clock | None = None, listener: Listener | None = None) -> None:
        self._now_ns = (clock or MonotonicClock()).now_ns
        self._listener = listener
        self._state = StoreState()
        self._numbers = itertools.count(1)
        self._clients: dict[int, Connection] = {}
        self._handed_over: deque[Connection] = deque()
        self._unfinished: set[int] = set()  # clients with more requests than one turn handles
        self._closing = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ)
        # A daemon, so that a program that does not close the server can still end.
        self._thread = threading.Thread(target=self._run, name="braid-store-server", daemon=True)
        self._thread.start()

    @classmethod
    def listen(
        cls,
        address: str,
        secret: Secret,
        run_id: str,
        *,
        listen_anywhere: bool = False,
        clock: Clock | None = None,
    ) -> StoreServer:
        """Start a server with a listener; see `Listener` for the arguments and errors."""
        identity = Identity(run_id, STORE_ROLE, -1)
        listener = Listener(
            address,
            secret,
            identity,
            listen_anywhere=listen_anywhere,
            limits=STORE_LIMITS,
            clock=clock,
        )
        try:
            return cls(clock=clock, listener=listener)
        except BaseException:
            listener.close()
            raise

    @property
    def address(self) -> str:
        """Address of the server's listener.

        Raises:
            ConfigError: The server has no listener.
        """
        if self._listener is None:
            msg = "this StoreServer has no listener: pass connections to serve()"
            raise ConfigError(msg)
        return self._listener.address

    def serve(self, connection: Connection) -> None:
        """Serve the client at the other end of `connection`; the server owns it from now on.

        Raises:
            StaleError: The server is closed.
        """
        if self._closing or not self._thread.is_alive():
            connection.close()
            msg = f"cannot serve {connection.peer}: the store server is closed; open a new one"
            raise StaleError(msg)
        self._handed_over.append(connection)
        self._wake()

    def close(self) -> None:
        """Close all connections and the listener, and join the thread. Idempotent.

        Clients that wait get PeerLostError.
        """
        self._closing = True
        self._wake()
        self._thread.join()
        while self._handed_over:
            self._handed_over.popleft().close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def __repr__(self) -> str:
        state = self._state
        return (
            f"<StoreServer with {state.num_keys} keys, {len(self._clients)} clients, "
            f"{state.num_waiting} waiting>"
        )

    def _wake(self) -> None:
        # If the pipe is full, the thread wakes anyway; if it is closed, the thread has ended.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"w")

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select(self._pause_s()):
                    if key.fileobj is self._wake_reader:
                        self._admit_handed_over()
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._poll_client(key.data, events)
                for client in list(self._unfinished):
                    self._poll_client(client, 0)
                now_ns = self._now_ns()
                if self._listener is not None:
                    overdue_ns = self._listener.next_deadline_ns()
                    if overdue_ns is not None and overdue_ns <= now_ns:
                        self._accept()
                self._deliver(self._state.expire(now_ns))
        finally:
            for client in list(self._clients):  # after any error: no client waits for a dead server
                self._drop(client)

    def _accept(self) -> None:
        """Advance the handshakes of the server's listener."""
        if self._listener is not None:
            for connection in self._listener.accept_ready():
                self._admit(connection)

    def _pause_s(self) -> float | None:
        """Return how long to wait for a readable socket; None without a limit."""
        if self._unfinished:
            return 0
        deadlines = [self._state.next_deadline_ns()]
        if self._listener is not None:
            deadlines.append(self._listener.next_deadline_ns())
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0, min(known) - self._now_ns()) / 1e9 if known else None

    def _admit_handed_over(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)
        while self._handed_over:
            self._admit(self._handed_over.popleft())

    def _admit(self, connection: Connection) -> None:
        if connection.closed:
            return
        client = next(self._numbers)
        self._clients[client] = connection
        self._selector.register(connection, selectors.EVENT_READ, client)
        # The previous owner may have read its first frames already.
        self._poll_client(client, 0)

    def _poll_client(self, client: int, events: int) -> None:
        """Send queued replies to `client`, and execute its requests for one turn."""
        self._unfinished.discard(client)
        connection = self._clients.get(client)
        if connection is None:  # dropped in this round
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._select(client, connection, connection.flush() or 0)
            for _ in range(_REQUESTS_PER_TURN):
                frame = connection.try_recv()
                if frame is None:
                    return
                call = unpack_call(frame)
                self._deliver(
                    self._state.request(
                        client,
                        call.number,
                        call.request,
                        now_ns=self._now_ns(),
                        timeout_ns=call.timeout_ns,
                    )
                )
            self._unfinished.add(client)
        except CommError:
            self._drop(client)

    def _deliver(self, deliveries: Iterable[AddressedReply]) -> None:
        for client, number, reply in deliveries:
            connection = self._clients.get(client)
            if connection is None:
                continue
            try:
                try:
                    queued_bytes = connection.post(*pack(StoreResult(number, reply)))
                except ConfigError as exc:  # the values exceed the limit of a frame
                    queued_bytes = connection.post(*pack(StoreResult(number, Refusal(str(exc)))))
                self._select(client, connection, queued_bytes or 0)
            except CommError:
                self._drop(client)

    def _select(self, client: int, connection: Connection, queued_bytes: int) -> None:
        """Select for writing only while replies are queued; drop a client that does not read."""
        if queued_bytes > _MAX_OUTBOX_BYTES:
            self._drop(client)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if queued_bytes else 0)
        if self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events, client)

    def _drop(self, client: int) -> None:
        connection = self._clients.pop(client, None)
        if connection is not None:
            self._selector.unregister(connection)
            connection.close()
            self._state.forget(client)
            self._unfinished.discard(client)
