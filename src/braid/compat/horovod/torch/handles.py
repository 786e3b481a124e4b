"""Handles of asynchronous operations, and functions that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from braid.compat.horovod.common.exceptions import translated
from braid.compat.horovod.fusion import FusionHandle, Result
from braid.errors import ConfigError

__all__ = ["Pending", "PendingSparse", "poll", "synchronize"]


class Pending:
    """Handle of one or several unfinished operations; `synchronize` returns their result.

    Args:
        parts: Handles of the engine.
        finish: Function that combines the results of the handles.
        held: Object to keep alive until the operations are done.

    Attributes:
        parts: Handles of the engine.
    """

    def __init__(
        self,
        parts: Sequence[FusionHandle],
        finish: Callable[[list[Result]], Any],
        held: object = None,
    ) -> None:
        self.parts = list(parts)
        self._finish = finish
        self._held = held
        self._is_consumed = False

    def done(self) -> bool:
        """Return whether all operations are done."""
        return all(part.done() for part in self.parts)

    def wait(self) -> Any:
        """Block until all operations are done; return the result, once.

        Raises:
            ConfigError: The result has been returned before.
            HorovodInternalError: An operation failed.
        """
        if self._is_consumed:
            msg = f"{self!r} has been waited for already: wait for a handle only once"
            raise ConfigError(msg)
        self._is_consumed = True
        try:
            with translated():
                results = [part.wait() for part in self.parts]
        finally:
            self._held = None
        return self._finish(results)

    def __repr__(self) -> str:
        return f"Pending({', '.join(part.name for part in self.parts)})"


class PendingSparse(Pending):
    """Handle of a sparse reduction; calling it waits for the sparse tensor, as in Horovod."""

    def __call__(self) -> Any:
        """Block until the reduction is done; return the sparse tensor, see `Pending.wait`."""
        return self.wait()


def poll(handle: Pending) -> bool:
    """Return whether an operation is done, so that `synchronize` would not block."""
    return _checked(handle).done()


def synchronize(handle: Pending) -> Any:
    """Block until an operation is done; return its result.

    Raises:
        ConfigError: The argument is not a handle, or was waited for already.
        HorovodInternalError: The operation failed; raised on all ranks if their requests differ.
    """
    return _checked(handle).wait()


def _checked(handle: Any) -> Pending:
    if not isinstance(handle, Pending):
        msg = f"got {handle!r} instead of a handle: pass the result of an asynchronous operation"
        raise ConfigError(msg)
    return handle
