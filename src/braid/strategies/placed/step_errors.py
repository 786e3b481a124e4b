"""Errors of the parts of one step, and which of them is the cause.

When a part fails, the master ends the step in all tasks, and the parts that wait fail as well.
"""

from __future__ import annotations

import threading

from braid.errors import PeerLostError, StaleError
from braid.strategies.placed.tasks import TaskCall
from braid.strategies.placed.worker import RESTORE

__all__ = ["StepErrors"]


class StepErrors:
    """Errors of the calls to tasks in one step, in the order of time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: list[tuple[TaskCall, BaseException]] = []

    def __bool__(self) -> bool:
        return bool(self._failed)

    def add(self, call: TaskCall, error: BaseException) -> bool:
        """Add the error of a call, at most once; return whether it is the step's first error."""
        with self._lock:
            if all(other is not call for other, _ in self._failed):
                self._failed.append((call, error))
                return len(self._failed) == 1
            return False

    def cause(self) -> tuple[TaskCall, BaseException]:
        """Return the error that caused the others: a lost task, else the first original error."""
        return min(self._failed, key=_rank)  # the first one in time among equals


def _rank(failed: tuple[TaskCall, BaseException]) -> int:
    _, error = failed
    if isinstance(error, PeerLostError) and not str(error).startswith("On "):
        return 0  # the master itself has lost the task
    return 2 if isinstance(error, StaleError) and RESTORE not in str(error) else 1
