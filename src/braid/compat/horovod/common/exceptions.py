"""Exceptions of Horovod's functions, and the translation of braid's exceptions into them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from braid.errors import CommError, ConfigError, StaleError

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "NotInitializedError",
    "UnsupportedArgumentError",
    "translated",
]


class HorovodInternalError(RuntimeError):
    """Error of an operation that was refused on all ranks, or that failed."""


class NotInitializedError(StaleError, ValueError):
    """Error if `hvd.init()` was not called; a ValueError, as in Horovod."""


class UnsupportedArgumentError(ConfigError, NotImplementedError):
    """Error if an operation does not support an argument; a NotImplementedError, as in Horovod."""


class HostsUpdatedInterrupt(Exception):
    """Raised in an elastic run before ranks join or leave; this rank keeps its state.

    Args:
        skip_sync: Whether this rank's state needs no synchronization. All ranks synchronize if any
            rank needs it.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Translate braid's errors inside the context into Horovod's.

    Raises:
        HorovodInternalError: Raised from a CommError.
    """
    try:
        yield
    except CommError as error:
        raise HorovodInternalError(str(error)) from error
