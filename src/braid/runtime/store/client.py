"""The client of a store server: many threads, one connection, no background thread.

Problem: a thread that waits for a key must not keep another thread from setting it, although both
use one connection. A reader thread would solve this, but costs two thread switches per operation.

Idea: requests carry numbers. One waiting thread at a time reads for all. It stores the replies to
other threads, and another thread takes over when its own reply has come ("leader and followers").

Source: D. Schmidt et al., "Leader/Followers", PLoP 2000.
"""

from __future__ import annotations

import itertools
import threading

from braid.errors import CommError, CommTimeout, PeerLostError
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.closing import Closing
from braid.runtime.store.interface import Store
from braid.runtime.store.protocol import StoreCall, pack, unpack_result
from braid.runtime.store.store_state import Reply, Request
from braid.runtime.wire import DEFAULT_TIMEOUT_S, Connection

__all__ = ["StoreClient"]

_ANSWER_LIMIT_S = 30.0  # time after a request's deadline when the server counts as stuck


class StoreClient(Closing, Store):
    """Store whose server is in another process.

    Args:
        connection: Connection to a `StoreServer`; owned and closed by this object.
        default_timeout_s: Time-out of operations that are called without one.
        clock: Clock for deadlines; the host's when None.

    Cost: one round trip for each operation.

    On failure: every operation raises PeerLostError once the server is gone.
    """

    def __init__(
        self,
        connection: Connection,
        default_timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(default_timeout_s)
        self._connection = connection
        self._now_ns = (clock or MonotonicClock()).now_ns
        self._numbers = itertools.count(1)
        self._arrived = threading.Condition(threading.Lock())
        self._pending: set[int] = set()
        self._replies: dict[int, Reply] = {}
        self._reading = False  # whether a thread reads for all
        self._failure: CommError | None = None

    def close(self) -> None:
        """Close the connection; threads that wait get PeerLostError. Idempotent."""
        self._connection.close()

    def __repr__(self) -> str:
        return f"<StoreClient of {self._connection.peer}>"

    def ask(self, request: Request, timeout_s: float) -> Reply:
        """Execute a request, and return the store's reply; see `Store.ask`."""
        number = next(self._numbers)
        timeout_ns = max(0, round(timeout_s * 1e9))
        deadline_ns = self._now_ns() + timeout_ns + round(_ANSWER_LIMIT_S * 1e9)
        meta, buffers = pack(StoreCall(number, timeout_ns, request))
        with self._arrived:
            self._pending.add(number)
        try:
            self._connection.send(meta, buffers)
            while (reply := self._await_turn(number, deadline_ns)) is None:
                self._read(number, deadline_ns)
            return reply
        finally:
            with self._arrived:
                self._pending.discard(number)
                self._replies.pop(number, None)

    def _await_turn(self, number: int, deadline_ns: int) -> Reply | None:
        """Wait for the reply to `number`; returns None when this thread has to read for all."""
        with self._arrived:
            while True:
                reply = self._replies.get(number)
                if reply is not None:
                    return reply
                if self._failure is not None:
                    rank = getattr(self._failure, "rank", -1)
                    raise PeerLostError(str(self._failure), rank=rank) from self._failure
                if not self._reading:
                    self._reading = True
                    return None
                remaining_ns = deadline_ns - self._now_ns()
                if remaining_ns <= 0:
                    raise self._late()
                self._arrived.wait(remaining_ns / 1e9)

    def _read(self, number: int, deadline_ns: int) -> None:
        """Read for all until the reply to `number` has come."""
        failure: CommError | None = None
        try:
            arrived = 0
            while arrived != number:
                remaining_ns = max(0, deadline_ns - self._now_ns())
                result = unpack_result(self._connection.recv(remaining_ns / 1e9))
                arrived = result.number
                with self._arrived:
                    if arrived in self._pending:  # else its caller has stopped waiting
                        self._replies[arrived] = result.reply
                        if arrived != number:
                            self._arrived.notify_all()
        except CommTimeout as exc:
            raise self._late() from exc
        except CommError as exc:
            failure = exc
        finally:
            with self._arrived:
                self._reading = False
                self._failure = self._failure or failure
                self._arrived.notify_all()

    def _late(self) -> CommTimeout:
        msg = (
            f"the store server {self._connection.peer} did not answer within "
            f"{_ANSWER_LIMIT_S:g} s after the deadline: it is stopped or stuck"
        )
        return CommTimeout(msg)
