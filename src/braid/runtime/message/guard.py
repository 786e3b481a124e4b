"""The lock of a van's state, and a way to wait for changes of it, cheap while nobody waits."""

from __future__ import annotations

import threading

__all__ = ["Guard"]


class Guard(threading.Condition):
    """A condition that is notified far more often than anybody waits for it.

    Attributes:
        lock: Lock of the condition; taking it directly is quicker.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._num_waiting = 0
        super().__init__(self.lock)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a change; False after `timeout` seconds without one."""
        self._num_waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self._num_waiting -= 1

    def notify_all(self) -> None:
        """Wake all threads that wait."""
        if self._num_waiting:
            super().notify_all()
