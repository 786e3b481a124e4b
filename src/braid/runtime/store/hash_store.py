"""A store in this process, shared by its threads, for jobs of threads and jobs of one rank."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.store.interface import Store
from braid.runtime.store.store_state import AddressedReply, Reply, Request, StoreState
from braid.runtime.wire import DEFAULT_TIMEOUT_S

__all__ = ["HashStore"]


class HashStore(Store):
    """A store under a lock; all threads use the same object.

    Args:
        default_timeout_s: Time-out of operations that are called without one.
        clock: Clock for deadlines; the host's when None.
    """

    def __init__(
        self, default_timeout_s: float = DEFAULT_TIMEOUT_S, *, clock: Clock | None = None
    ) -> None:
        super().__init__(default_timeout_s)
        self._now_ns = (clock or MonotonicClock()).now_ns
        self._state = StoreState()
        self._arrived = threading.Condition()
        self._replies: dict[int, Reply] = {}
        self._callers = itertools.count()

    def __repr__(self) -> str:
        return f"<HashStore with {self._state.num_keys} keys>"

    def ask(self, request: Request, timeout_s: float) -> Reply:
        """Execute a request, and return the store's reply; see `Store.ask`."""
        caller = next(self._callers)
        timeout_ns = round(timeout_s * 1e9)
        with self._arrived:
            now_ns = self._now_ns()
            self._file(
                self._state.request(caller, 0, request, now_ns=now_ns, timeout_ns=timeout_ns)
            )
            try:
                while caller not in self._replies:
                    deadline_ns = self._state.next_deadline_ns() or now_ns
                    self._arrived.wait(max(0, deadline_ns - self._now_ns()) / 1e9)
                    self._file(self._state.expire(self._now_ns()))
            finally:  # also when the caller is interrupted
                self._state.forget(caller)
                reply = self._replies.pop(caller, None)
            assert reply is not None
            return reply

    def _file(self, deliveries: Iterable[AddressedReply]) -> None:
        for delivery in deliveries:
            self._replies[delivery.client] = delivery.reply
        if self._replies:
            self._arrived.notify_all()
