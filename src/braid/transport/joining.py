"""Which way the ranks of a host reach each other, and the way there.

shared memory   Linux on x86-64: ranks map each other's memory (`shm`)
portable        everywhere else, and where it is asked for: ranks send each other copies (`portable`)
"""

from __future__ import annotations

import os

from braid.clock import Clock
from braid.store import Store
from braid.transport.base import MemoryTransport
from braid.transport.health import Health
from braid.transport.meeting import Meeting
from braid.transport.memory import has_ordered_stores
from braid.transport.portable import connect_portable
from braid.transport.shm import connect_shared
from braid.wire import Secret

__all__ = ["connect"]


def connect(
    rank: int,
    world_size: int,
    store: Store,
    clock: Clock,
    health: Health,
    *,
    timeout_s: float = 600.0,
    portable: bool = False,
    secret: Secret | None = None,
    pass_descriptors: bool = False,
) -> MemoryTransport:
    """Reach the other ranks of a job on this host.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks that will join.
        store: Shared by all ranks of the job; used here only.
        clock: Time source of all later waits.
        health: Hears of each peer's end.
        timeout_s: Seconds to wait for the other ranks.
        portable: Send copies even where memory could be shared; the same on all ranks.
        secret: Of the job, for the connections of the portable way; made and handed over in the store when None.
        pass_descriptors: Do not even try `/proc/<pid>/fd`.

    Returns:
        A transport on which every rank can be reached.

    Raises:
        ConfigError: Ranks run on several hosts, or only some are portable.
        RendezvousError: Some ranks did not come (they are named), one came twice, or one has another secret.
    """
    meeting = Meeting(rank, world_size, store, clock=clock, health=health, timeout_s=timeout_s)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    crowded = world_size > (cores or 1)
    if portable or not has_ordered_stores():
        return connect_portable(meeting, crowded=crowded, secret=secret)
    return connect_shared(meeting, crowded=crowded, pass_descriptors=pass_descriptors)
