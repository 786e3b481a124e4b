"""The context of a rank, which is passed to all objects that communicate; there are no globals."""

from __future__ import annotations

from typing import NamedTuple

from braid.runtime.clock import Clock
from braid.runtime.events import Recorder
from braid.runtime.store import Store
from braid.runtime.transport.health import Health

__all__ = ["RankContext"]


class RankContext(NamedTuple):
    """One rank of a job.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        clock: Time source of everything that waits.
        events: Recorder of events (last events and trace) of this rank.
        health: Losses of other ranks.
        store: Key-value service of the job.
    """

    rank: int
    world_size: int
    clock: Clock
    events: Recorder
    health: Health
    store: Store
