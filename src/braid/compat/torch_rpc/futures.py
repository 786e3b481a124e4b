"""The functions of torch.futures, which end at the first error.

An error that Python sets with `set_exception` is a result for torch's `collect_all`: it waits for
all futures, and forever if one of them never completes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from threading import Lock
from typing import Any

from torch.futures import Future

from braid.rpc.outcomes import AnswerFuture, outcome

__all__ = ["Future", "collect_all", "wait_all"]


def collect_all(futures: Iterable[Future[Any]]) -> Future[list[Future[Any]]]:
    """Return a future that completes when all futures have, or fails with the first error.

    Its value is the list of the futures.
    """
    collected: Future[Any] = AnswerFuture()
    listed = list(futures)
    running = set(range(len(listed)))
    lock = Lock()

    def record(index: int, future: Future[Any]) -> None:
        if not running:  # an earlier error has completed `collected`
            return
        _, error = outcome(future)
        with lock:
            if index not in running:
                return
            running.discard(index)
            if error is not None:
                running.clear()
            is_last = not running
        if error is not None:
            collected.set_exception(error)
        elif is_last:
            collected.set_result(listed)
        del error  # its frames refer to the future, which the garbage collector cannot see

    if not listed:
        collected.set_result(listed)
    for index, future in enumerate(listed):
        future.add_done_callback(partial(record, index))
    return collected


def wait_all(futures: Iterable[Future[Any]]) -> list[Any]:
    """Return the values of all futures when they have completed; raise the first error."""
    return [future.wait() for future in collect_all(futures).wait()]
