"""Ranks as processes of one host, which access each other's memory through the kernel.

Each rank publishes the address of its root in the store and opens its peers' roots, which lead to
all memory that is allocated later. If the kernel refuses `/proc/<pid>/fd` to any rank, all ranks
pass their descriptors over a socket instead (`descriptor_service`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from braid.errors import CommError, PeerLostError
from braid.runtime.transport.descriptor_service import DescriptorService, open_through_services
from braid.runtime.transport.hosts import LocalPeers
from braid.runtime.transport.meeting import Meeting
from braid.runtime.transport.memory import (
    BASE,
    MAGIC,
    MARK,
    PID,
    MappedMemory,
    Root,
    RootAddress,
    open_through_proc,
)
from braid.runtime.transport.pull import POSSIBLE, allow_siblings, read
from braid.runtime.transport.wait import Doorbells

__all__ = ["SHARED_MEMORY", "Shared", "share"]

SHARED_MEMORY = "shared memory"


class Shared(NamedTuple):
    """Memory, and pipes that wake sleeping threads (doorbells), shared by the ranks of a host.

    Attributes:
        root: This rank's root: the memory in which peers find its other memory.
        bells: This rank's doorbells: pipes with which peers wake its threads.
        local: Peers of this host, with access to their memory.
    """

    root: Root
    bells: Doorbells
    local: LocalPeers


def share(meeting: Meeting, ranks: Sequence[int], *, pass_descriptors: bool = False) -> Shared:
    """Join the shared memory of this host.

    Args:
        meeting: Meeting of all ranks in the store; its `health` gets a pidfd of each peer.
        ranks: The ranks of this host, including this one.
        pass_descriptors: Use the descriptor service without trying `/proc/<pid>/fd` first.
    """
    rank, health = meeting.rank, meeting.health
    with contextlib.ExitStack() as undo:
        root = Root.create(rank)
        undo.callback(root.close)
        bells = Doorbells(root)
        undo.callback(bells.close)
        allow_siblings()  # before other ranks can know this process and try to read it
        me = os.getpid()
        address = RootAddress(me, start_time(me), root.file.fd, bells.write_fds)
        texts = meeting.gather("shm/root", address.to_text(), ranks)
        addresses = {r: RootAddress.from_text(t) for r, t in zip(ranks, texts, strict=True)}
        service = None
        peers = MappedMemory(addresses, open_through_proc(addresses))
        undo.callback(peers.close)
        if _refused(meeting, peers, ranks, force=pass_descriptors):
            service = DescriptorService(rank)
            undo.callback(service.close)
            words = meeting.gather("shm/service", service.name, ranks)
            peers.close()
            names = dict(zip(ranks, words, strict=True))
            peers = MappedMemory(addresses, open_through_services(addresses, names))
            undo.callback(peers.close)
        may_pull = _may_pull(meeting, addresses, peers, forbid=pass_descriptors)
        undo.callback(health.close)
        for other, where in addresses.items():
            # a start time that differs: another pid namespace, where only the launcher knows
            # which process died
            if other != rank and start_time(where.pid) == where.started:
                health.register_process(other, where.pid)
        undo.pop_all()
    close = service.close if service else None
    return Shared(root, bells, LocalPeers(frozenset(ranks), peers, may_pull=may_pull, close=close))


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; with the pid it is unique."""
    path = Path(f"/proc/{pid}/stat")
    return int(path.read_text().rpartition(")")[2].split()[19]) if path.exists() else 0


def _refused(meeting: Meeting, peers: MappedMemory, ranks: Sequence[int], *, force: bool) -> bool:
    """Open all peers' roots; return the same on every rank: whether any rank was refused."""
    refused = force
    try:
        for other in ranks:
            if not refused:
                peers.root(other)
    except PermissionError:
        refused = True
    return "refused" in meeting.gather("shm/probe", "refused" if refused else "opened", ranks)


def _may_pull(
    meeting: Meeting, addresses: dict[int, RootAddress], peers: MappedMemory, *, forbid: bool
) -> bool:
    """Try to read all peers' private memory; return the same on every rank: whether all can."""
    others = [(r, where.pid) for r, where in addresses.items() if r != meeting.rank]
    may = not forbid and POSSIBLE and all(_can_read(r, pid, peers.root(r)) for r, pid in others)
    return "no" not in meeting.gather("shm/pull", "yes" if may else "no", addresses)


def _can_read(rank: int, pid: int, root: Root) -> bool:
    """Return whether this rank can read the root (control words) of `rank` in that process."""
    words = (ctypes.c_uint64 * (MARK + 1))()
    try:
        read(rank, pid, root.words[BASE], ctypes.addressof(words), ctypes.sizeof(words))
    except (CommError, PeerLostError):
        return False
    # in another pid namespace the pid may be another process, with other bytes there
    return words[MARK] == MAGIC and words[PID] == root.words[PID]
