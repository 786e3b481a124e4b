"""Makes this process a rank among others that share a store, under any launcher or none.

    store + rank + size -> claim of the rank -> transport to all ranks -> RankContext

`membership.join_job` calls it with the launcher's settings, `torch_backend` with the store of
`init_process_group`, the tests with a store in a file.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import NamedTuple

from braid.errors import RendezvousError
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.events import EventRing, Recorder
from braid.runtime.store import Store
from braid.runtime.transport import Health, MemoryTransport, Network, RankContext, connect
from braid.runtime.wire import Secret

__all__ = ["JoinedRank", "claim", "join"]

PRIVATE_RECORDS = 4096  # number of events kept without a launcher


class JoinedRank(NamedTuple):
    """A rank that can reach its peers; the caller of `join` closes the transport.

    Attributes:
        context: Context for all objects that communicate.
        transport: Transport between the ranks.
    """

    context: RankContext
    transport: MemoryTransport


def claim(store: Store, rank: int) -> int:
    """Claim `rank` in a store that these processes may use for several consecutive jobs.

    Returns:
        Number of times that this process has claimed the rank, from 1. A prefix that contains it
        keeps the keys of one job apart from those of the next.

    Raises:
        RendezvousError: Another process has this rank.
    """
    me = f"{socket.gethostname()}:{os.getpid()}".encode()
    owner = store.compare_set(f"owner/{rank}", b"", me)
    if owner != me:
        msg = (
            f"two processes have rank {rank}: {owner.decode()} and {me.decode()}. Give every "
            "process its own RANK, or use a new rendezvous address or file for a new job"
        )
        raise RendezvousError(msg)
    return store.add(f"joins/{rank}", 1)


def join(
    store: Store,
    rank: int,
    size: int,
    *,
    clock: Clock | None = None,
    health: Health | None = None,
    recorder: Recorder | None = None,
    timeout_s: float = 600.0,
    portable: bool = False,
    secret: Secret | None = None,
    network: Network | None = None,
    host: str = "",
) -> JoinedRank:
    """Become a rank; collective among all ranks.

    Args:
        store: Store of all ranks, under a prefix that no earlier job has used.
        rank: Global rank of this process.
        size: Number of ranks.
        clock: Time source of the rank; the monotonic clock of the host when None.
        health: Collector of lost peers; a new one when None.
        recorder: Recorder of events; one of 4,096 records that no launcher reads when None.
        timeout_s: Seconds to wait for all ranks.
        portable: Whether ranks send data in messages even where they could share memory.
        secret: Secret of the job, for connections between hosts.
        network: Settings of the network, for ranks on other hosts; loopback when None.
        host: Name of this rank's host, so that ranks of one host can act as if they were on
            several; the real name when empty.

    Raises:
        RendezvousError: Some ranks did not join, or cannot be reached; the message names them.
        ConfigError: Only some ranks are portable, or ranks of several hosts have no common secret.
    """
    clock = clock or MonotonicClock()
    health = health or Health(rank, clock)
    transport = connect(
        rank,
        size,
        store,
        clock,
        health,
        timeout_s=timeout_s,
        portable=portable,
        secret=secret,
        network=network,
        host=host,
    )
    recorder = recorder or _private_recorder()
    return JoinedRank(RankContext(rank, size, clock, recorder, health, store), transport)


def _private_recorder() -> Recorder:
    memory = bytearray(EventRing.nbytes_for(PRIVATE_RECORDS))
    return Recorder(EventRing(memory, PRIVATE_RECORDS, names_lock=threading.Lock()))
