"""Futures that are finished by the thread that waits for them.

Problem: c10d's futures are set by a thread of the backend. A callback passed to `then` may start
another collective and wait for it (PowerSGD does): if callbacks ran on the thread that runs
collectives, it would wait for itself.

Idea: a future can wait for its collective. `finish` waits and sets the value. It is called by the
first Python thread that needs the value, at the end of backward, or by the background poller; each
of these may wait for other futures inside callbacks. `then` returns a future that is finished
through the original one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.futures import Future

__all__ = ["WorkFuture"]

S = TypeVar("S")


class WorkFuture(Future[Any]):
    """Future of a collective's value.

    Attributes:
        error: Error of the collective or of a callback; None if there is none.

    Args:
        wait: Function that returns when the collective has ended, or raises its error.
        value: Value of the future after the collective has ended.
    """

    def __init__(self, wait: Callable[[], object], value: Any) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._wait = wait
        self._value = value
        self._lock = threading.Lock()
        self._claimed = False
        self._is_continued = False

    def finish(self) -> None:
        """Wait for the collective and set the value, unless another thread does."""
        with self._lock:
            if self._claimed:
                return
            self._claimed = True
        try:
            self._wait()
        except BaseException as exc:  # noqa: BLE001 - raised where the value is read
            self.error = exc
            self.set_exception(exc)
        else:
            self.set_result(self._value)

    def finish_alone(self) -> None:
        """Wait for the collective and set the value, if no callback depends on it.

        Callbacks may start collectives, in an order that must be the same on all ranks.
        """
        if not self._is_continued:
            self.finish()

    def wait_for_other_thread(self) -> None:
        """Return when another thread has finished the future; `error` is set if it failed."""
        with contextlib.suppress(Exception):
            super().wait()

    def wait(self) -> Any:
        """Return the value; finish the future if it is not finished yet."""
        self.finish()
        return super().wait()

    def value(self) -> Any:
        """Return the value of a finished future."""
        return super().value()

    def then(self, callback: Callable[[Future[Any]], S]) -> Future[S]:
        """Return a future of the result of `callback` on this one."""
        self._is_continued = True
        return self._after(self, callback)

    def _after(self, before: Future[Any], callback: Callable[[Future[Any]], S]) -> Future[S]:
        after: _After = _After(self)

        def run(_ended: Future[Any]) -> None:
            try:
                value = callback(before)
            except Exception as exc:  # noqa: BLE001 - raised where the value is read
                self.error = self.error or exc
                after.set_exception(exc)
            else:
                after.set_result(value)

        before.add_done_callback(run)
        return after


class _After(Future[Any]):
    """Future that depends on a `WorkFuture`, directly or not."""

    def __init__(self, origin: WorkFuture) -> None:
        super().__init__()
        self._origin = origin

    def wait(self) -> Any:
        self._origin.finish()
        return super().wait()

    def then(self, callback: Callable[[Future[Any]], S]) -> Future[S]:
        return self._origin._after(self, callback)  # noqa: SLF001 - its continuation
