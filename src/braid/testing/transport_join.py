"""Ranks that reach each other inside one process, each in its own way: for tests of what they say when they cannot."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from braid.clock import MonotonicClock
from braid.errors import BraidError
from braid.store import HashStore, Store
from braid.transport import Health, MemoryTransport, connect

__all__ = ["join_all"]


def join_all(
    options: Sequence[dict[str, Any]], *, store: Store | None = None, **shared: Any
) -> list[MemoryTransport | BraidError]:
    """Let each rank call `connect`, on a thread of its own.

    Args:
        options: Of each rank.
        store: Where they meet; a new one when None.
        shared: Options of all ranks, unless they have their own.

    Returns:
        Of each rank its transport, which the caller closes, or what it was told.
    """
    found: dict[int, MemoryTransport | BraidError] = {}
    meeting = HashStore() if store is None else store

    def join(rank: int) -> None:
        clock = MonotonicClock()
        health = Health(rank, clock)
        own = {**shared, **options[rank]}
        try:
            found[rank] = connect(rank, len(options), meeting, clock, health, **own)
        except BraidError as error:
            found[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(options))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(options))]
