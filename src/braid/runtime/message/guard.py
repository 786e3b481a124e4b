"""Lock of a van's state, with a condition that is cheap to notify while no thread waits."""

from __future__ import annotations

import threading

__all__ = ["Guard"]


class Guard(threading.Condition):
    """Condition that is notified far more often than threads wait for it.

    Attributes:
        lock: Lock of the condition; `with guard.lock` is faster than `with guard`.
        num_waiting: Number of threads that wait.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.num_waiting = 0
        super().__init__(self.lock)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a change; return False after `timeout` seconds without one."""
        self.num_waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self.num_waiting -= 1

    def notify_all(self) -> None:
        """Wake all waiting threads."""
        if self.num_waiting:
            super().notify_all()
