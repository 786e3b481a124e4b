"""Calls of a node that are not answered, and those that are sent again when the callee is lost.

    @rpc.idempotent
    def lookup(keys): ...

A call is executed at most once, so one whose answer is lost with its node fails: it may have been
executed or not. For a function whose second execution changes nothing more, that makes no
difference. Its calls wait until a node of that name is there again, until their deadline.

Source: A. Birrell, B. Nelson, 1984, section 3.4, on at-most-once execution and crashes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec

from braid.errors import ConfigError, PeerLostError, RendezvousError
from braid.rpc.leader_followers import LeaderFollowers
from braid.rpc.scope import Scope
from braid.runtime.events import Span
from braid.runtime.message import Delivery

__all__ = ["Finish", "PendingCall", "PendingCalls", "Retries", "idempotent", "is_idempotent"]

Finish: TypeAlias = Callable[[Any, "BaseException | None"], None]
Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "_braid_rpc_idempotent"
FIRST_NS, LONGEST_NS = 250_000_000, 4_000_000_000  # between two attempts, doubled each time


def idempotent(function: Function) -> Function:
    """Mark a function: its calls are sent again if its node is lost. The outermost decorator.

    Only the mark at the caller matters. Executing the function twice must equal executing it once.

    Raises:
        ConfigError: Attributes cannot be set on the function, such as on built-in ones.
    """
    try:
        setattr(function, MARK, True)
    except AttributeError as exc:
        msg = (
            f"{function!r} cannot be marked as idempotent: wrap it in a Python function and mark "
            "that"
        )
        raise ConfigError(msg) from exc
    return function


def is_idempotent(function: object) -> bool:
    """Return whether calls of a function may be sent again."""
    return getattr(function, MARK, False) is True


class PendingCall(msgspec.Struct, eq=False):
    """A call that this node has made and that is not answered yet.

    Attributes:
        to: Number of the callee.
        name: Name of the function.
        deadline_ns: Time after which it fails; None for never.
        finish: Called with the result and the error; one of them is None.
        waiter: Key of the thread that waits for the call, see `LeaderFollowers.wait`; its `finish`
            is quick. None if no thread waits.
        scope: Call of a peer inside which this call was made; None if the program made it.
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
        """Add a call that is about to be sent in the message with this number."""
        with self._lock:
            self._calls[number] = call
            self._counts[call.to] += 1
            self.num_begun += 1
        if call.scope is not None:
            call.scope.calls.add(number)

    def count(self, to: int) -> int:
        """Return the number of calls that a node has not answered."""
        return self._counts[to]

    def get(self, number: int) -> PendingCall | None:
        """Return the call with a number; None if it is answered."""
        return self._calls.get(number)

    def finish(self, number: int, value: Any, error: BaseException | None) -> None:
        """Complete the call `number` with a result or an error, unless it is complete already."""
        call = self.take(number)
        if call is None:
            return
        call.finish(value, error)
        if call.waiter is not None:
            self._pool.wake(call.waiter)
        else:
            self._pool.notify()

    def take(self, number: int) -> PendingCall | None:
        """Remove and return a call that is answered or was not sent; None if it is not pending."""
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
        """Fail the calls that `which` selects, each with the error that `error` returns."""
        with self._lock:
            failed = [(number, call) for number, call in self._calls.items() if which(call)]
        for number, call in failed:
            self.finish(number, None, error(call))

    def is_quick(self, answer: Delivery) -> bool:
        """Return whether an answer can be handled quickly, because a thread waits for its call."""
        call = self._calls.get(answer.answers)
        return call is not None and call.waiter is not None


class Retries:
    """Calls that wait to be sent again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, Callable[[], None], Finish]] = []

    def __len__(self) -> int:
        """Return the number of calls that wait."""
        return len(self._waiting)

    def attempt(
        self,
        send: Callable[[Finish], None],
        finish: Finish,
        deadline_ns: int | None,
        now_ns: Callable[[], int],
        pause_ns: int = FIRST_NS,
    ) -> None:
        """Send a call; whenever its node is lost or unreachable, send it again later.

        Args:
            send: Function that sends the call, and calls its argument at the call's end. An
                exception of the first attempt is raised; a later one becomes the call's error.
            finish: Function of the last attempt's result or error.
            deadline_ns: Time after which the call is not sent again; None for no limit.
            now_ns: Clock.
            pause_ns: Time until the next attempt.
        """

        def on_end(value: Any, error: BaseException | None) -> None:
            if not isinstance(error, PeerLostError | RendezvousError):
                finish(value, error)
                return
            at_ns = now_ns() + pause_ns
            if deadline_ns is not None and at_ns >= deadline_ns:
                finish(None, error)
                return

            def again() -> None:
                longer = min(2 * pause_ns, LONGEST_NS)
                try:
                    self.attempt(send, finish, deadline_ns, now_ns, longer)
                except Exception as exc:  # noqa: BLE001 - the caller must receive it
                    finish(None, exc)

            with self._lock:
                self._waiting.append((at_ns, again, finish))

        send(on_end)

    def tick(self, now_ns: int) -> None:
        """Send again the calls that are due at `now_ns`."""
        with self._lock:
            due = [again for at_ns, again, _ in self._waiting if at_ns <= now_ns]
            self._waiting = [call for call in self._waiting if call[0] > now_ns]
        for again in due:
            again()

    def fail(self, error: BaseException) -> None:
        """Fail all calls that wait to be sent again, because the node ends."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for _, _, finish in waiting:
            finish(None, error)
