"""Calls of a node that are not answered."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from braid.rpc.leader_followers import LeaderFollowers
from braid.rpc.scope import Scope
from braid.runtime.events import Span

__all__ = ["Finish", "PendingCall", "PendingCalls"]

Finish: TypeAlias = Callable[[Any, "BaseException | None"], None]


class PendingCall(msgspec.Struct, eq=False):
    """A call that is not answered.

    Attributes:
        to: Number of the callee.
        name: Name of the function.
        deadline_ns: Time after which it fails; None for never.
        finish: Function of the result and of the error, of which one is None.
        waiter: Key of the thread that waits for it, see `LeaderFollowers.wait`; `finish` takes no
            time then. None if none does.
        scope: Call that has made it; None for one of the program.
        span: Span of the call in the trace; None without a launcher that reads it.
    """

    to: int
    name: str
    deadline_ns: int | None
    finish: Finish
    waiter: object
    scope: Scope | None = None
    span: Span | None = None


class PendingCalls:
    """All calls of a node that are not answered, by the number of their message.

    Args:
        pool: Threads that wait for them.
    """

    def __init__(self, pool: LeaderFollowers) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._calls: dict[int, PendingCall] = {}
        self._counts: Counter[int] = Counter()  # by callee
        self.num_begun = 0

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, number: int, call: PendingCall) -> None:
        """Add a call that is about to be sent."""
        with self._lock:
            self._calls[number] = call
            self._counts[call.to] += 1
            self.num_begun += 1
        if call.scope is not None:
            call.scope.calls.add(number)

    def discard(self, number: int) -> None:
        """Forget a call that could not be sent."""
        self._take(number)

    def count(self, to: int) -> int:
        """Return the number of calls that a node has not answered."""
        return self._counts[to]

    def get(self, number: int) -> PendingCall | None:
        """Return a call; None if it is answered."""
        return self._calls.get(number)

    def finish(self, number: int, value: Any, error: BaseException | None) -> None:
        """Complete a call, unless it is complete."""
        call = self._take(number)
        if call is None:
            return
        call.finish(value, error)
        if call.waiter is not None:
            self._pool.wake(call.waiter)
        else:
            self._pool.notify()

    def _take(self, number: int) -> PendingCall | None:
        with self._lock:
            call = self._calls.pop(number, None)
            if call is None:
                return None
            self._counts[call.to] -= 1
        if call.scope is not None:
            call.scope.calls.discard(number)
        if call.span is not None:
            call.span.end()
        return call

    def fail(
        self, which: Callable[[PendingCall], bool], error: Callable[[PendingCall], BaseException]
    ) -> None:
        """Let some calls fail, each with an error of its own."""
        with self._lock:
            failed = [(number, call) for number, call in self._calls.items() if which(call)]
        for number, call in failed:
            self.finish(number, None, error(call))

    def is_quick(self, number: int) -> bool:
        """Whether an answer takes no time to handle, because a thread waits for it."""
        call = self._calls.get(number)
        return call is not None and call.waiter is not None
