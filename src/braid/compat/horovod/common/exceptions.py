"""The exceptions of Horovod's functions, and the translation of braid's into them."""

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
    """An operation was refused on all ranks, or could not be carried out."""


class NotInitializedError(StaleError, ValueError):
    """`hvd.init()` was not called. Horovod raises a ValueError, so this is one, too."""


class UnsupportedArgumentError(ConfigError, NotImplementedError):
    """An operation is not defined for an argument; Horovod's is a NotImplementedError."""


class HostsUpdatedInterrupt(Exception):
    """Members of an elastic run are about to change; the state of this rank stays as it is.

    Args:
        skip_sync: Whether this rank needs no other state; members that disagree synchronize.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Translate errors of braid inside the context into errors of Horovod's operations.

    Raises:
        HorovodInternalError: In place of CommError, which is its cause.
    """
    try:
        yield
    except CommError as error:
        raise HorovodInternalError(str(error)) from error
