"""The memory transport of a rank: an arena, doorbells, and access to peers' memory.

Processes and threads differ only in the access to peers' memory (`PeerMemory`): `shm` opens it
through the kernel, `inproc` looks it up in a dictionary, `hosts` keeps copies of the data that
ranks of other hosts have sent. The code above runs on all of them, so every collective can be
tested with threads and used with processes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from braid.runtime.clock import Clock
from braid.runtime.events import NameTable
from braid.runtime.transport.arena import Arena
from braid.runtime.transport.health import Health
from braid.runtime.transport.memory import LEFT, SLEEPERS, STATE, PeerMemory, Root
from braid.runtime.transport.wait import Doorbells, Waiter

__all__ = ["Audience", "MemoryTransport"]

Audience: TypeAlias = Any  # each transport has its own type
ROOT_LINE = 0  # address of the first line of the root; extents begin with 1
LINGER_S = 5.0  # how long a rank that ends waits for peers that still run

# marked in a forked child, which is cheaper than to read the process id in every call
_TRANSPORTS: weakref.WeakSet[MemoryTransport] = weakref.WeakSet()


def _note_fork() -> None:
    """In a forked child: mark each transport, and replace its descriptors by /dev/null.

    So a child, such as a worker of a DataLoader, can neither write into its parent's sockets nor
    keep them open after the parent's death.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for transport in _TRANSPORTS:
        transport.forked = True
        for fd in transport.open_fds():
            with contextlib.suppress(OSError):
                os.dup2(null, fd, inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_note_fork)


class _OpenSocket(Protocol):
    """An open connection; its descriptor is negative once it is closed."""

    def fileno(self) -> int:
        """Return the descriptor."""
        ...


class MemoryTransport:
    """This rank's end of the shared memory of a job.

    Attributes:
        hosts: Number of each rank's host; ranks with the same number share memory.
        forked: Whether this process is a forked child of the one that made the transport.
        closed: Whether the transport has been closed.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        root: Root of this rank: the memory in which peers find its other memory.
        bells: Doorbells of this rank: pipes with which peers wake its threads.
        peers: Access to the memory of peers.
        clock: Time source of all waits.
        health: Registry of lost peers.
        crowded: Whether this host has more ranks than cores.
        may_pull: Whether ranks that share memory may read each other's private memory.
        on_close: Called last by `close`; closes services of this transport.
        arena: Arena of this rank; one that peers can map when None.
        waiter: Strategy for waits; one that polls memory when None.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        root: Root,
        bells: Doorbells,
        peers: PeerMemory,
        clock: Clock,
        health: Health,
        crowded: bool,
        may_pull: bool = False,
        on_close: Callable[[], None] | None = None,
        arena: Arena | None = None,
        waiter: Waiter | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.hosts: tuple[int, ...] = (0,) * world_size
        self.clock = clock
        self.health = health
        self.may_pull = may_pull
        self.bells = bells
        self.arena = arena or Arena(rank, root, peers)
        self.waiter = waiter or Waiter(bells, health, clock, crowded=crowded)
        self._root = root
        self._peers = peers
        self._fence = threading.Lock()
        self.forked = False  # whether this is a forked child of the process that made it
        self.closed = False
        self._sockets: tuple[_OpenSocket, ...] = ()
        _TRANSPORTS.add(self)
        self._on_close = on_close
        health.on_loss(bells.ring_own)
        health.set_leave_check(self._is_leaving)

    @property
    def names(self) -> NameTable:
        """Name table of this rank: texts that peers can read."""
        return self._root.names

    def names_of(self, rank: int) -> NameTable:
        """Return the name table of `rank`."""
        return self._root.names if rank == self.rank else self._peers.root(rank).names

    def shares_with(self, ranks: Sequence[int]) -> bool:  # noqa: ARG002 - shares with all
        """Return whether this rank and `ranks` can read each other's tensors in place."""
        return True

    def backlog(self, ranks: Sequence[int]) -> bool:  # noqa: ARG002 - memory needs no sending
        """Return whether data published for `ranks` is still queued on this rank."""
        return False

    def audience(self, ranks: Sequence[int]) -> Audience:
        """Return `ranks` in the form that `publish` takes."""
        return [(rank, self._peers.root(rank).words) for rank in ranks]

    def publish(
        self,
        audience: Audience,
        line: int,  # noqa: ARG002 - peers see the memory itself
        block: int = 0,  # noqa: ARG002
        nbytes: int = 0,  # noqa: ARG002
        parts: Sequence[tuple[int, int]] | None = None,  # noqa: ARG002
        *,
        changes: bool = False,  # noqa: ARG002
    ) -> None:
        """Make a control line and the data it describes visible to `audience`; wake its threads.

        Call this after both have been stored. Peers may see stored data before it is published.

        Args:
            audience: Peers, made by `audience`.
            line: Address of the line of eight words in the arena; `ROOT_LINE` for the root's first.
            block: Address of the data that the line describes; 0 without data.
            nbytes: Length of the data.
            parts: First and past-the-end byte of the data for each peer; None for all data.
            changes: Whether the data may change before the peers have received it, so that a copy
                must be sent.
        """
        self._fence.acquire()  # a full fence between our store and our load of their announcement
        self._fence.release()
        for rank, words in audience:
            slots = words[SLEEPERS]
            if slots:
                self._peers.ring(rank, slots)

    def pull(self, rank: int, address: int, out: torch.Tensor) -> None:
        """Fill contiguous `out` from private memory of `rank` at `address`; needs `may_pull`.

        The peer must not free or change that memory meanwhile.

        Cost: one copy by the kernel.
        """
        self._peers.pull(rank, address, out)

    def fds(self) -> list[int]:
        """Descriptors of pipes, memory and pidfds, which a forked child must not keep."""
        root = [self._root.file.fd] if self._root.file.fd >= 0 else []
        sockets = [fd for socket in self._sockets if (fd := socket.fileno()) >= 0]
        return [*self.bells.fds(), *self.arena.fds(), *root, *self.health.fds(), *sockets]

    def open_fds(self) -> list[int]:
        """Return the open descriptors of `fds`; none once the transport is closed."""
        return [] if self.closed else self.fds()

    def keep_from_children(self, sockets: Iterable[_OpenSocket]) -> None:
        """Add `sockets` to the descriptors that forked children lose."""
        self._sockets = (*self._sockets, *sockets)

    def announce_end(self, linger_s: float = LINGER_S) -> None:
        """Notify the peers that this rank ends on purpose, and wait until they read its last data.

        A peer opens new memory of this rank at its first use, which requires this process to run.
        Ranks that end at about the same time wait for each other here; a rank that ends earlier
        waits for `linger_s` at most.
        """
        self._root.words[STATE] = LEFT
        ranks = [r for r in range(self.world_size) if r != self.rank]
        self.publish(self.audience(ranks), ROOT_LINE)
        others = [(rank, self._peers.root(rank).words) for rank in ranks]
        lost = self.health.lost
        deadline_ns = self.clock.after_ns(linger_s)

        def all_gone() -> bool:
            gone = all(words[STATE] == LEFT or rank in lost for rank, words in others)
            return gone or self.clock.now_ns() > deadline_ns

        self.waiter.until(all_gone, lambda: None)

    def close(self) -> None:
        """Free all resources. Peers that still map this memory keep it until they unmap it."""
        self.closed = True
        self.arena.close()
        self._peers.close()
        self.bells.close()
        self.health.close()
        self._root.close()
        if self._on_close is not None:
            self._on_close()

    def _is_leaving(self, rank: int) -> bool:
        return int(self._peers.root(rank).words[STATE]) == LEFT
