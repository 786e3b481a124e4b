"""Connects ranks inside one process, each with its own options, to test errors of `connect`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from braid.errors import BraidError
from braid.runtime.clock import MonotonicClock
from braid.runtime.store import HashStore, Store
from braid.runtime.transport import Health, MemoryTransport, connect

__all__ = ["join_all"]


def join_all(
    options: Sequence[dict[str, Any]], *, store: Store | None = None, **shared: Any
) -> list[MemoryTransport | BraidError]:
    """Call `connect` for each rank, on a thread of its own.

    Args:
        options: Options of each rank.
        store: Store in which ranks meet; a new one when None.
        shared: Options of all ranks, unless they have their own.

    Returns:
        The transport of each rank, which the caller closes, or the error of the rank.
    """
    outcomes: dict[int, MemoryTransport | BraidError] = {}
    meeting = HashStore() if store is None else store

    def join(rank: int) -> None:
        clock = MonotonicClock()
        health = Health(rank, clock)
        own = {**shared, **options[rank]}
        try:
            outcomes[rank] = connect(rank, len(options), meeting, clock, health, **own)
        except BraidError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(options))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[rank] for rank in range(len(options))]
