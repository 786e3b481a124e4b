"""The functions of torch.futures, which end at the first error.

torch's `collect_all` sees a success where Python has set an error, since `set_exception` stores it
as a result: it waits for all futures, and forever if one of them never completes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from threading import Lock
from typing import Any

from torch.futures import Future

from braid.rpc.outcomes import AnswerFuture

__all__ = ["Future", "collect_all", "wait_all"]


def collect_all(futures: Iterable[Future[Any]]) -> Future[list[Future[Any]]]:
    """Return a future that completes when all futures have, or with the first of their errors.

    Its value is the list of the futures.
    """
    collected: Future[Any] = AnswerFuture()
    listed = list(futures)
    running = set(range(len(listed)))
    lock = Lock()

    def record(index: int, future: Future[Any]) -> None:
        error = None
        try:
            future.value()
        except Exception as exc:  # noqa: BLE001 - the caller's wait raises it
            error = exc
        with lock:
            if not running:
                return  # an earlier error has completed it
            running.discard(index)
            if error is not None:
                running.clear()
            if running:
                return
        if error is not None:
            collected.set_exception(error)
        else:
            collected.set_result(listed)

    if not listed:
        collected.set_result(listed)
    for index, future in enumerate(listed):
        future.add_done_callback(partial(record, index))
    return collected


def wait_all(futures: Iterable[Future[Any]]) -> list[Any]:
    """Return the values of all futures when they have completed; raise the first error."""
    return [future.wait() for future in collect_all(futures).wait()]
