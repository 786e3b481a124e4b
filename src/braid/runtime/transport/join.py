"""Chooses how the ranks of a job reach each other, and connects them.

shared memory   inside a host, on Linux on x86-64 with the C++ runtime: ranks map each other's
                memory (`shm`)
sockets         between hosts, on other systems, and on request: ranks send each other copies of
                the data (`hosts`)
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Sequence

from braid.runtime.clock import Clock
from braid.runtime.store import Store
from braid.runtime.transport.atomic import is_atomic_between_processes
from braid.runtime.transport.base import MemoryTransport
from braid.runtime.transport.health import Health
from braid.runtime.transport.hosts import HostsTransport, LocalPeers
from braid.runtime.transport.links import Link, Links
from braid.runtime.transport.meeting import Meeting, host_name
from braid.runtime.transport.memory import ROOT_BYTES, MemoryFile, Root, has_ordered_stores
from braid.runtime.transport.mirror import MirroredMemory
from braid.runtime.transport.peer_connections import Network, call_all
from braid.runtime.transport.shm import SHARED_MEMORY, Shared, share
from braid.runtime.transport.wait import Doorbells
from braid.runtime.wire import Secret

__all__ = ["connect"]

LOG = logging.getLogger(__name__)

PORTABLE = "portable (BRAID_PORTABLE, or a system that cannot share memory)"


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
    host: str = "",
    network: Network | None = None,
) -> MemoryTransport:
    """Connect this rank to the other ranks of a job.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks that will join.
        store: Store shared by all ranks of the job; used only in this call.
        clock: Time source of all later waits.
        health: Collector of lost peers.
        timeout_s: Seconds to wait for the other ranks.
        portable: Whether to send copies even where memory could be shared; the same on all ranks.
        secret: Secret of the job, for connections.
        pass_descriptors: Whether to pass descriptors over sockets without trying `/proc/<pid>/fd`.
        host: Name of this rank's host, so that ranks of one host can act as if they were on
            several; the real name when empty.
        network: Addresses for ranks of other hosts; the loopback address when None.

    Returns:
        A transport on which every rank can be reached.

    Raises:
        ConfigError: Only some ranks are portable, or the hosts have no common secret.
        RendezvousError: Some ranks did not join (the message names them), a rank joined twice, has
            another secret or cannot be reached.
    """
    meeting = Meeting(rank, world_size, store, clock=clock, health=health, timeout_s=timeout_s)
    apart = portable or not (has_ordered_stores() and is_atomic_between_processes())
    hosts = meeting.hosts(PORTABLE if apart else SHARED_MEMORY, host or host_name())
    if len(set(hosts)) == 1:
        network = Network(one_host=True)
    if apart:  # no two ranks share memory
        here, hosts = hosts.count(hosts[rank]), tuple(range(world_size))
    else:
        here = hosts.count(hosts[rank])
    LOG.info(
        "ranks %s of %d are on this host; %s",
        [r for r in range(world_size) if hosts[r] == hosts[rank]],
        world_size,
        "copies over sockets, as this is " + PORTABLE if apart else SHARED_MEMORY,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    crowded = here > (cores or 1)
    local = [r for r in range(world_size) if hosts[r] == hosts[rank]]
    with contextlib.ExitStack() as undo:
        undo.callback(health.close)
        shared = _alone(rank) if apart else share(meeting, local, pass_descriptors=pass_descriptors)
        undo.callback(_close, shared)
        if len(local) == world_size and not apart:
            transport = _local_only(meeting, shared, crowded=crowded)
        else:
            mirrors = MirroredMemory(r for r in range(world_size) if hosts[r] != hosts[rank])
            undo.callback(mirrors.close)
            links: dict[int, Link] = {}
            calls = call_all(meeting, hosts, secret, network or Network())
            for call in calls.values():
                undo.callback(call.connection.close)
            for peer, call in calls.items():
                links[peer] = Link(
                    peer,
                    call.connection,
                    shared.root,
                    mirrors,
                    host=call.host if call.host != socket.gethostname() else "",
                    over_network=call.over_network,
                )
                health.expect_end(peer, call.pid)
            transport = _with_remote(meeting, shared, hosts, mirrors, links, crowded=crowded)
        undo.pop_all()
    return transport


def _alone(rank: int) -> Shared:
    root = Root(MemoryFile.private(ROOT_BYTES, f"braid-root-{rank}"))
    return Shared(root, Doorbells(root), LocalPeers(frozenset([rank])))


def _local_only(meeting: Meeting, shared: Shared, *, crowded: bool) -> MemoryTransport:
    local = shared.local
    assert local.memory is not None
    return MemoryTransport(
        meeting.rank,
        meeting.world_size,
        root=shared.root,
        bells=shared.bells,
        peers=local.memory,
        clock=meeting.clock,
        health=meeting.health,
        crowded=crowded,
        may_pull=local.may_pull,
        on_close=local.close,
    )


def _with_remote(
    meeting: Meeting,
    shared: Shared,
    hosts: Sequence[int],
    mirrors: MirroredMemory,
    links: dict[int, Link],
    *,
    crowded: bool,
) -> HostsTransport:
    rank, health, clock = meeting.rank, meeting.health, meeting.clock
    return HostsTransport(
        rank,
        meeting.world_size,
        hosts=tuple(hosts),
        root=shared.root,
        bells=shared.bells,
        local=shared.local,
        mirrors=mirrors,
        links=Links(rank, links, memory=mirrors, bells=shared.bells, health=health, clock=clock),
        clock=clock,
        health=health,
        crowded=crowded,
    )


def _close(shared: Shared) -> None:
    shared.bells.close()
    if shared.local.memory is not None:
        shared.local.memory.close()
    if shared.local.close is not None:
        shared.local.close()
    shared.root.close()
