"""Handles of asynchronous operations, and how to wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from braid.compat.horovod.common.exceptions import translated
from braid.compat.horovod.fusion import FusionHandle, Result
from braid.errors import ConfigError

__all__ = ["Pending", "PendingSparse", "poll", "synchronize"]


class Pending:
    """One or several operations under way, whose results make one.

    Args:
        parts: Handles of the engine.
        finish: Function that makes the result of theirs.
        held: Object that must live until then.

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
            msg = f"{self!r} has been waited for, and a handle is waited for once"
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
    """Sparse reduction under way; calling the handle waits for the sparse tensor, as in Horovod."""

    def __call__(self) -> Any:
        """Block until the reduction is done; return the sparse tensor, see `Pending.wait`."""
        return self.wait()


def poll(handle: Pending) -> bool:
    """Return whether an operation is over, so that `synchronize` would return at once."""
    return _checked(handle).done()


def synchronize(handle: Pending) -> Any:
    """Block until an operation is done; return its result.

    Raises:
        ConfigError: The argument is no handle, or has been waited for.
        HorovodInternalError: The operation failed; on all ranks, if ranks asked for different
            things.
    """
    return _checked(handle).wait()


def _checked(handle: Any) -> Pending:
    if not isinstance(handle, Pending):
        msg = (
            f"got {handle!r} in place of a handle: pass what an asynchronous operation has returned"
        )
        raise ConfigError(msg)
    return handle
