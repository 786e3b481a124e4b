"""Futures that whoever waits for them can bring about.

Problem: c10d's futures are set by a thread of the backend. A callback given to `then` may start another collective and
wait for it (PowerSGD does): if callbacks ran on the thread that carries collectives out, it would wait for itself.

Idea: a future knows how to wait for its collective. `settle` does that and sets the value; it is called by the first
who needs the value from Python, by the end of backward, or by a thread of its own (`Settler`), and each of them may go on to wait
for other futures inside the callbacks that this releases. `then` gives a future that settles through its origin.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from torch.futures import Future

__all__ = ["Settler", "WorkFuture"]

S = TypeVar("S")


class WorkFuture(Future[Any]):
    """The value of a collective.

    Attributes:
        error: What kept it, or something that was to be done `then`, from a value.

    Args:
        wait: Returns when the collective has ended, raises what stopped it.
        value: The value then.
    """

    def __init__(self, wait: Callable[[], object], value: Any) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._wait = wait
        self._value = value
        self._lock = threading.Lock()
        self._claimed = False

    def settle(self) -> None:
        """Wait for the collective and set the value, unless another thread is at it."""
        with self._lock:
            if self._claimed:
                return
            self._claimed = True
        try:
            self._wait()
        except BaseException as exc:  # noqa: BLE001 - belongs to whoever takes the value
            self.error = exc
            self.set_exception(exc)
        else:
            self.set_result(self._value)

    def wait(self) -> Any:
        """The value; brings it about if nobody does."""
        self.settle()
        return super().wait()

    def value(self) -> Any:
        """The value, which must be there."""
        return super().value()

    def then(self, callback: Callable[[Future[Any]], S]) -> Future[S]:
        """A future of what `callback` makes of this one."""
        return self._after(self, callback)

    def _after(self, before: Future[Any], callback: Callable[[Future[Any]], S]) -> Future[S]:
        after: _After = _After(self)

        def run(_ended: Future[Any]) -> None:
            try:
                value = callback(before)
            except Exception as exc:  # noqa: BLE001 - belongs to whoever takes the value
                self.error = self.error or exc
                after.set_exception(exc)
            else:
                after.set_result(value)

        before.add_done_callback(run)
        return after


class _After(Future[Any]):
    """What comes of a `WorkFuture`, at any remove."""

    def __init__(self, origin: WorkFuture) -> None:
        super().__init__()
        self._origin = origin

    def wait(self) -> Any:
        self._origin.settle()
        return super().wait()

    def then(self, callback: Callable[[Future[Any]], S]) -> Future[S]:
        return self._origin._after(self, callback)  # noqa: SLF001 - its continuation


class Settler:
    """Settles futures in the background, in the order of their collectives; owns a thread while there are any.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._futures: deque[WorkFuture] = deque()
        self._thread: threading.Thread | None = None

    def add(self, future: WorkFuture) -> None:
        """Settle `future` some time soon."""
        with self._lock:
            self._futures.append(future)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Join the thread; what it waits for must have ended or been stopped."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._futures:
                    self._thread = None
                    return
                future = self._futures.popleft()
            future.settle()
