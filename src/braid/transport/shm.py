"""Ranks as processes of one host: each finds the others' memory through the kernel.

Each rank publishes the address of its root in the store and opens its peers'. Nothing else is agreed on: whatever is
allocated later is found from the roots. When the kernel refuses `/proc/<pid>/fd` to any rank, all ranks hand their
descriptors over a socket instead (`fd_service`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from braid.clock import Clock
from braid.errors import CommError, CommTimeout, ConfigError, PeerLostError, RendezvousError
from braid.store import Store
from braid.transport.base import MemoryTransport
from braid.transport.fd_service import FdService, open_through_services
from braid.transport.health import Health
from braid.transport.memory import (
    BASE,
    MAGIC,
    MARK,
    PID,
    MappedMemory,
    Root,
    RootAddress,
    open_through_proc,
    require_ordered_stores,
)
from braid.transport.pull import POSSIBLE, allow_siblings, read
from braid.transport.wait import Doorbells

__all__ = ["connect"]

LOOK_S = 0.25  # how often a rank that waits for others to join looks whether one of them has died


def connect(
    rank: int,
    world_size: int,
    store: Store,
    clock: Clock,
    health: Health,
    *,
    timeout_s: float = 600.0,
    pass_descriptors: bool = False,
) -> MemoryTransport:
    """Join the shared memory of a job.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks that will join.
        store: Shared by all ranks of the job; used here only.
        clock: Time source of all later waits.
        health: Gets a pidfd of each peer.
        timeout_s: Seconds to wait for the other ranks.
        pass_descriptors: Do not even try `/proc/<pid>/fd`.

    Returns:
        A transport on which every rank can be reached.

    Raises:
        ConfigError: The processor or system is not supported, or ranks run on several hosts.
        RendezvousError: Some ranks did not come (they are named), or one came twice.
    """
    if world_size > 1:
        require_ordered_stores()
    if store.add(f"shm/joined/{rank}", 1) > 1:
        msg = (
            f"expected one process with rank {rank}, found a second one (pid {os.getpid()}): give every process "
            "its own RANK, or use a fresh rendezvous address for a new job"
        )
        raise RendezvousError(msg)
    with contextlib.ExitStack() as undo:
        root = Root.create(rank)
        undo.callback(root.close)
        bells = Doorbells(root)
        undo.callback(bells.close)
        allow_siblings()  # before anyone can learn of this process and try
        me = os.getpid()
        address = RootAddress(me, start_time(me), root.file.fd, bells.write_fds)
        store.set(f"shm/address/{rank}", f"{_host()}|{address.to_text()}".encode())
        wait = partial(_wait, store, health=health, clock=clock, timeout_s=timeout_s)
        addresses = _gather(rank, world_size, store, wait, timeout_s)
        service = None
        peers = MappedMemory(addresses, open_through_proc(addresses))
        undo.callback(peers.close)
        if _refused(rank, world_size, store, wait, peers, force=pass_descriptors):
            service = FdService(rank)
            undo.callback(service.close)
            store.set(f"shm/service/{rank}", service.name.encode())
            keys = [f"shm/service/{r}" for r in range(world_size)]
            wait(keys)
            names = {r: name.decode() for r, name in enumerate(store.multi_get(keys))}
            peers.close()
            peers = MappedMemory(addresses, open_through_services(addresses, names))
            undo.callback(peers.close)
        may_pull = _may_pull(rank, store, wait, addresses, peers, forbid=pass_descriptors)
        undo.callback(health.close)
        for other, where in addresses.items():
            # a start time that does not fit: another pid namespace, where only the launcher can tell who died
            if other != rank and start_time(where.pid) == where.started:
                health.watch(other, where.pid)
        undo.pop_all()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return MemoryTransport(
        rank,
        world_size,
        root=root,
        bells=bells,
        peers=peers,
        clock=clock,
        health=health,
        crowded=world_size > (cores or 1),
        may_pull=may_pull,
        on_close=service.close if service else None,
    )


def start_time(pid: int) -> int:
    """Start time of a process in clock ticks since boot: with the pid, it names the process."""
    path = Path(f"/proc/{pid}/stat")
    return int(path.read_text().rpartition(")")[2].split()[19]) if path.exists() else 0


def _host() -> str:
    """Name of this host and of its present boot; equal for processes that share memory."""
    path = Path("/proc/sys/kernel/random/boot_id")
    boot = path.read_text().strip() if path.exists() else ""
    return f"{socket.gethostname()}/{boot}"


def _wait(store: Store, keys: list[str], *, health: Health, clock: Clock, timeout_s: float) -> None:
    """Wait for keys of all ranks, but not for ranks of which the launcher says that they have ended."""
    deadline_ns = clock.now_ns() + round(timeout_s * 1e9)
    while True:
        left_s = (deadline_ns - clock.now_ns()) / 1e9
        try:
            store.wait(keys, max(0.0, min(left_s, LOOK_S)))
        except CommTimeout:
            health.collect()
            for loss in health.lost.values():
                msg = f"rank {loss.rank} {loss.reason}, before all ranks had joined"
                raise PeerLostError(msg, rank=loss.rank) from None
            if left_s <= LOOK_S:
                raise
        else:
            return


def _gather(
    rank: int,
    world_size: int,
    store: Store,
    wait: Callable[[list[str]], None],
    timeout_s: float,
) -> dict[int, RootAddress]:
    keys = [f"shm/address/{r}" for r in range(world_size)]
    try:
        wait(keys)
    except CommTimeout as exc:
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        msg = (
            f"expected {world_size} ranks within {timeout_s:g} s, found all but {missing} (this is rank {rank}): "
            "were they started with this WORLD_SIZE and rendezvous address?"
        )
        raise RendezvousError(msg) from exc
    texts = [value.decode().partition("|") for value in store.multi_get(keys)]
    hosts = {r: host for r, (host, _, _) in enumerate(texts)}
    if len(set(hosts.values())) > 1:
        table = "\n".join(f"  rank {r}  {host.partition('/')[0]}" for r, host in hosts.items())
        msg = (
            "expected all ranks on one host (memory is shared inside a host only), found\n"
            f"{table}\nstart all ranks on one host"
        )
        raise ConfigError(msg)
    return {r: RootAddress.from_text(text) for r, (_, _, text) in enumerate(texts)}


def _refused(
    rank: int,
    world_size: int,
    store: Store,
    wait: Callable[[list[str]], None],
    peers: MappedMemory,
    *,
    force: bool,
) -> bool:
    """Open all peers' roots; True on every rank if any rank was refused."""
    refused = force
    try:
        for other in range(world_size):
            if not refused:
                peers.root(other)
    except PermissionError:
        refused = True
    word = "refused" if refused else "opened"
    return "refused" in _all_say(store, wait, "shm/probe", rank, world_size, word)


def _may_pull(
    rank: int,
    store: Store,
    wait: Callable[[list[str]], None],
    addresses: dict[int, RootAddress],
    peers: MappedMemory,
    *,
    forbid: bool,
) -> bool:
    """Try to read every peer's private memory; True on every rank if all ranks may."""
    others = [(r, where.pid) for r, where in addresses.items() if r != rank]
    may = not forbid and POSSIBLE and all(_can_read(r, pid, peers.root(r)) for r, pid in others)
    answers = _all_say(store, wait, "shm/pull", rank, len(addresses), "yes" if may else "no")
    return "no" not in answers


def _all_say(
    store: Store,
    wait: Callable[[list[str]], None],
    topic: str,
    rank: int,
    world_size: int,
    word: str,
) -> list[str]:
    """Tell all ranks a word and hear theirs."""
    store.set(f"{topic}/{rank}", word.encode())
    keys = [f"{topic}/{r}" for r in range(world_size)]
    wait(keys)
    return [value.decode() for value in store.multi_get(keys)]


def _can_read(rank: int, pid: int, root: Root) -> bool:
    """Whether the beginning of the root of `rank` can be read where its owner mapped it."""
    words = (ctypes.c_uint64 * (MARK + 1))()
    try:
        read(rank, pid, root.words[BASE], ctypes.addressof(words), ctypes.sizeof(words))
    except (CommError, PeerLostError):
        return False
    # in another pid namespace the number may be another process, which holds other bytes there
    return words[MARK] == MAGIC and words[PID] == root.words[PID]
