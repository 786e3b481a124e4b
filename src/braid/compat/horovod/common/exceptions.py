"""Exceptions of `horovod.common.exceptions`."""

from __future__ import annotations

from braid.compat.horovod.failure import HorovodInternalError, NotInitializedError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "NotInitializedError"]


class HostsUpdatedInterrupt(Exception):
    """Hosts of an elastic job have changed; never raised, as there is no elastic training.

    Args:
        skip_sync: As in Horovod.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync
