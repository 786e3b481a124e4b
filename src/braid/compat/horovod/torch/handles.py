"""What asynchronous operations return, and how one waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from braid.compat.horovod.failure import HorovodInternalError, translated
from braid.errors import ConfigError
from braid.fusion import Handle, Result

__all__ = ["HorovodInternalError", "Pending", "poll", "synchronize"]


class Pending:
    """One or several operations under way, whose results make one.

    Args:
        parts: Of the engine.
        finish: Makes the result of theirs.
        held: What must live until then.

    Attributes:
        parts: As given.
    """

    def __init__(
        self,
        parts: Sequence[Handle],
        finish: Callable[[list[Result]], Any],
        held: object = None,
    ) -> None:
        self.parts = list(parts)
        self._finish = finish
        self._held = held
        self._taken = False

    def done(self) -> bool:
        """Whether all are."""
        return all(part.done() for part in self.parts)

    def take(self) -> Any:
        """The result, once.

        Raises:
            ConfigError: It has been taken.
            HorovodInternalError: An operation failed.
        """
        if self._taken:
            msg = f"expected a handle that is waited for once, found {self!r}, which has been"
            raise ConfigError(msg)
        self._taken = True
        try:
            with translated():
                results = [part.wait() for part in self.parts]
        finally:
            self._held = None
        return self._finish(results)

    def __repr__(self) -> str:
        return f"Pending({', '.join(part.name for part in self.parts)})"


def poll(handle: Pending) -> bool:
    """Whether an operation is over, so that `synchronize` would return at once."""
    return _checked(handle).done()


def synchronize(handle: Pending) -> Any:
    """Wait for an operation; its result.

    Raises:
        ConfigError: It is no handle, or has been waited for.
        HorovodInternalError: The operation failed; on all ranks, if ranks asked for different
            things.
    """
    return _checked(handle).take()


def _checked(handle: Any) -> Pending:
    if not isinstance(handle, Pending):
        msg = f"expected what an asynchronous operation has returned, found {handle!r}"
        raise ConfigError(msg)
    return handle
