"""RemoteValue: the result of a closure that a worker runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from braid.strategies.coordinator.coordinator import ClusterCoordinator

__all__ = ["ClosureCancelledError", "PackedResult", "RemoteValue"]


class ClosureCancelledError(RuntimeError):
    """Error of a closure that has not run, or has no valid result, since another one failed."""


class PackedResult(NamedTuple):
    """A closure's result as it arrived: packed bytes, buffers, and the worker that sent it."""

    packed: bytes
    buffers: Sequence[memoryview]
    worker: str


class RemoteValue:
    """The result of a closure, which may not have run yet.

    Args:
        coordinator: Coordinator of the closure.
        name: Name of the closure's function, for messages.

    Attributes:
        is_over: Whether the closure has ended, or was cancelled.
    """

    def __init__(self, coordinator: ClusterCoordinator, name: str) -> None:
        self._coordinator = coordinator
        self.name = name
        self._result: PackedResult | None = None  # until it is unpacked
        self._error: BaseException | None = None
        self._value: Any = None
        self.is_over = False

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.is_over else "waits"
        return f"RemoteValue({self.name}, {state})"

    def fetch(self, timeout_s: float | None = None) -> Any:
        """Wait for the closure and return its result.

        Raises:
            Exception: The closure's exception, with the worker's traceback in its text.
            ClosureCancelledError: Another closure has failed before.
            CommTimeout: No closure has ended for `timeout_s` (300 s when None).
        """
        self._coordinator.wait_for(self, timeout_s)
        if self._error is not None:
            raise self._error
        if self._result is not None:
            self._value, self._result = self._coordinator.unpack(*self._result), None
        return self._value

    get = fetch

    def end(self, result: PackedResult | None, error: BaseException | None = None) -> None:
        """Set the result or the error; the coordinator calls this."""
        self._result, self._error, self.is_over = result, error, True
