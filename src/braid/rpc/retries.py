"""Calls that are sent again when the callee is lost, where the function says that this is safe.

    @rpc.idempotent
    def lookup(keys): ...

A call is executed at most once, so one whose answer is lost with its node fails: it may have been
executed or not. For a function whose second execution changes nothing more, that makes no
difference. Its calls wait until a node of that name is there again, until their deadline.

Source: A. Birrell, B. Nelson, 1984, section 3.4, on at-most-once and what a crash leaves open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from braid.errors import ConfigError, PeerLostError, RendezvousError
from braid.rpc.pending import Finish

__all__ = ["Retries", "idempotent", "is_idempotent"]

Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "_braid_rpc_idempotent"
FIRST_NS, LONGEST_NS = 250_000_000, 4_000_000_000  # between two attempts, doubled each time


def idempotent(function: Function) -> Function:
    """Let calls of a function be sent again when its node is lost; a decorator, the outermost one.

    At the caller only the mark counts. Executing the function twice must be as good as once.

    Raises:
        ConfigError: The function has no attributes, as built-in ones.
    """
    try:
        setattr(function, MARK, True)
    except AttributeError as exc:
        msg = f"{function!r} cannot be marked as idempotent: wrap it in a function of your own"
        raise ConfigError(msg) from exc
    return function


def is_idempotent(function: object) -> bool:
    """Whether calls of a function may be sent again."""
    return getattr(function, MARK, False) is True


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
        """Send a call, and again later each time that its node is lost.

        Args:
            send: Function that sends it, with what to do at its end. Whatever it raises is raised
                the first time, and the error of the call later.
            finish: Function of the last attempt's result or error.
            deadline_ns: Time after which there is no further attempt; None for never.
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
                except Exception as exc:  # noqa: BLE001 - the caller must learn it
                    finish(None, exc)

            with self._lock:
                self._waiting.append((at_ns, again, finish))

        send(on_end)

    def tick(self, now_ns: int) -> None:
        """Send what is due."""
        with self._lock:
            due = [again for at_ns, again, _ in self._waiting if at_ns <= now_ns]
            self._waiting = [each for each in self._waiting if each[0] > now_ns]
        for again in due:
            again()

    def fail(self, error: BaseException) -> None:
        """Let all fail; the node ends."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for _, _, finish in waiting:
            finish(None, error)
