"""Handles of started collectives, and the policies for their steps.

A `Work` represents one operation, `Works` several. Waiting takes the steps; see `progress`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

from braid.comm.tensors.arguments import check_seconds

__all__ = ["StepsBy", "Work", "Works"]


class StepsBy(Enum):
    """Policy for which thread takes the steps of a started operation, and when."""

    CALLER = "caller"
    """The caller takes the steps that are possible now; the thread that waits takes the others."""
    WAITER = "waiter"
    """The thread that waits takes all steps; for operations that are waited for soon."""
    THREAD = "thread"
    """The progress thread takes all steps, as soon as they are possible."""


class Underway(Protocol):
    """Operation behind a Work: an `Operation`, or its counterpart for a backend of torch."""

    text: str
    error: BaseException | None

    @property
    def done(self) -> bool:
        """Whether the operation has ended."""
        ...

    def on_done(self, call: Callable[[], None]) -> None:
        """Call `call` when the operation ends."""
        ...


class Work:
    """A collective that has been started and may not have ended.

    A Work keeps the tensors of the collective alive until it has ended, through the algorithm that
    refers to them. Waiting twice is allowed.

    Attributes:
        result: Result of the collective; complete when it has ended.

    Args:
        operation: Started operation.
        wait: Function that waits for the operation: (operation, seconds or None).
        poll: Function that takes the possible steps of all started operations.
        result: Result of the collective.
        source: List that holds the sender's group rank, once a receive from any member has ended.
    """

    __slots__ = ("__weakref__", "_operation", "_poll", "_source", "_wait", "result")

    def __init__(
        self,
        operation: Underway,
        wait: Callable[[Any, float | None], None],
        poll: Callable[[Any], object],
        result: Any = None,
        source: list[int] | None = None,
    ) -> None:
        self._operation = operation
        self._wait = wait
        self._poll = poll
        self._source = source
        self.result = result

    @property
    def source(self) -> int:
        """Group rank of the sender, once a receive from any member has ended; else -1."""
        return self._source[0] if self._source else -1

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the tensors hold the result.

        Args:
            timeout_s: Seconds; None to wait until the operation's deadline.

        Raises:
            CommTimeout: `timeout_s` passed; the operation continues.
            CommError: The operation failed.
            ConfigError: `timeout_s` is not a number of seconds.
        """
        if timeout_s is not None:
            timeout_s = check_seconds(timeout_s, zero=True)
        self._wait(self._operation, timeout_s)

    def done(self) -> bool:
        """Take the steps that are possible now; return whether the collective has ended."""
        if not self._operation.done:
            self._poll(self._operation)
        return self._operation.done

    @property
    def succeeded(self) -> bool:
        """Whether the collective has ended without an error; takes no steps."""
        return self._operation.done and self._operation.error is None

    def exception(self) -> BaseException | None:
        """Return the error of the collective; None while it is in progress or if it succeeded."""
        return self._operation.error

    def add_done_callback(self, call: Callable[[Work], None]) -> None:
        """Call `call(self)` once when the collective has ended, in the thread that ends it."""
        self._operation.on_done(lambda: call(self))

    def __repr__(self) -> str:
        state = "failed" if self._operation.error else "done" if self._operation.done else "started"
        return f"Work({self._operation.text}, {state})"


class Works:
    """Handle of several Works.

    Args:
        works: Works in the order in which they were started.
        results: Results of the works, in the same order.
    """

    def __init__(self, works: Sequence[Work | Works], results: Sequence[Any]) -> None:
        self._works = works
        self.result = list(results)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all works; raise the error of the first that failed."""
        for work in self._works:
            work.wait(timeout_s)

    def done(self) -> bool:
        """Take the steps that are possible now; return whether all works have ended."""
        states = [work.done() for work in self._works]  # `done` takes possible steps
        return all(states)

    def exception(self) -> BaseException | None:
        """Return the error of the first work that failed; None if no work has failed."""
        return next((error for work in self._works if (error := work.exception())), None)

    def add_done_callback(self, call: Callable[[Works], None]) -> None:
        """Call `call(self)` once when all works have ended."""
        remaining = [len(self._works)]
        counting = threading.Lock()  # works end in several threads
        if not remaining[0]:
            call(self)

        def ended(_work: Work | Works) -> None:
            with counting:
                remaining[0] -= 1
                last = not remaining[0]
            if last:
                call(self)

        for work in self._works:
            work.add_done_callback(ended)

    def __repr__(self) -> str:
        return f"Works({list(self._works)})"
