"""Ranks of several hosts: shared memory inside each host, and sockets between hosts.

Problem: where memory cannot be shared, every collective would need a second form that uses
messages, and a third form if only some of its ranks share memory.

Idea: one form for all. *Local* peers map the memory of a rank and see published data directly. For
*remote* peers the data is written into a mirror that they keep (`mirror`), over one connection per
pair (`links`). Arena, lines, channels and the code above them do not depend on the difference, but
algorithms that read or write a peer's tensors in place are for groups of local ranks only
(`shares_with`).

           host a                                   host b
    +---------------------+                 +---------------------+
    |  rank 0     rank 1  |  0-2 0-3        |  rank 2     rank 3  |
    |  [arena 0]  [arena 1] ==== sockets ===|  [arena 2]  [arena 3]
    |      both map both  |  1-2 1-3        |      both map both  |
    |  mirrors of 2, 3    |                 |  mirrors of 0, 1    |
    +---------------------+                 +---------------------+

In portable mode no peer is local: macOS, ARM and some sandboxes lack anonymous memory files, or
processors that keep the order of stores.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from braid.runtime.clock import Clock
from braid.runtime.transport.announced_arena import AnnouncedArena, PrivateArena
from braid.runtime.transport.arena import LINE_BYTES, OFFSET_BITS
from braid.runtime.transport.base import LINGER_S, Audience, MemoryTransport
from braid.runtime.transport.health import Health
from braid.runtime.transport.links import Link, Links, LinkWaiter
from braid.runtime.transport.memory import (
    CLOSED,
    ROOT_WORDS_BYTES,
    RUNNING,
    STATE,
    PeerMemory,
    Root,
)
from braid.runtime.transport.mirror import ROOT_EXTENT, MirroredMemory, Writes
from braid.runtime.transport.wait import Doorbells

__all__ = ["HostsTransport", "LocalPeers"]


class LocalPeers(NamedTuple):
    """The peers of this host.

    Attributes:
        ranks: Global ranks, including this one.
        memory: Access to their memory; None if memory is not shared.
        may_pull: Whether these ranks may read each other's private memory.
        close: Called last; closes the services for these peers.
    """

    ranks: frozenset[int]
    memory: PeerMemory | None = None
    may_pull: bool = False
    close: Callable[[], None] | None = None


class HostsMemory:
    """Peers' memory: local ranks' memory is mapped, remote ranks' memory is mirrored.

    Args:
        rank: This rank.
        root: Root of this rank: the memory in which peers find its other memory.
        local: Peers of this host, with access to their memory.
        remote: Mirrors of the memory of the other peers.
    """

    def __init__(self, rank: int, root: Root, local: LocalPeers, remote: MirroredMemory) -> None:
        self._rank = rank
        self._root = root
        self._local = local.memory
        self._local_ranks = local.ranks
        self._remote = remote

    def root(self, rank: int) -> Root:
        """Return the root of `rank`, which leads to its other memory, or the copy of that root."""
        return self._root if rank == self._rank else self._of(rank).root(rank)

    def extent(self, rank: int, extent_id: int) -> mmap.mmap:
        """Return memory file `extent_id` of `rank`, or the copy of it."""
        return self._of(rank).extent(rank, extent_id)

    def forget(self, rank: int, extent_id: int) -> None:
        """Release the mapping or the copy of memory file `extent_id` of `rank`."""
        self._of(rank).forget(rank, extent_id)

    def ring(self, rank: int, slots: int) -> None:
        """Wake the waiting threads of a local rank that have their bits set in `slots`.

        Threads of ranks on other hosts wake when data arrives.
        """
        self._of(rank).ring(rank, slots)

    def pull(self, rank: int, address: int, out: torch.Tensor) -> None:
        """Fill `out` from private memory of a local rank at `address`."""
        self._of(rank).pull(rank, address, out)

    def close(self) -> None:
        """Unmap everything."""
        self._remote.close()
        if self._local is not None:
            self._local.close()

    def _of(self, rank: int) -> PeerMemory:
        return (
            self._local if self._local is not None and rank in self._local_ranks else self._remote
        )


class _Audience(NamedTuple):
    """Some peers, with their positions in the list passed to `audience`."""

    local: list[tuple[int, memoryview]]
    remote: list[tuple[int, Link]]


class HostsTransport(MemoryTransport):
    """A rank's end of the transport if not all ranks share memory.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        hosts: Number of each rank's host; hosts are numbered in the order of their first ranks.
        root: Shared memory of this rank, with its channels.
        bells: Descriptors with which peers wake this rank.
        local: Peers of this host.
        mirrors: Copies of the memory of the other peers.
        links: Connections to the other peers.
        clock: Time source of all waits.
        health: Registry of lost peers.
        crowded: Whether this host has more ranks than cores.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        hosts: tuple[int, ...],
        root: Root,
        bells: Doorbells,
        local: LocalPeers,
        mirrors: MirroredMemory,
        links: Links,
        clock: Clock,
        health: Health,
        crowded: bool,
    ) -> None:
        memory = HostsMemory(rank, root, local, mirrors)
        arena = PrivateArena if local.memory is None else AnnouncedArena
        super().__init__(
            rank,
            world_size,
            root=root,
            bells=bells,
            peers=memory,
            clock=clock,
            health=health,
            crowded=crowded,
            may_pull=local.may_pull,
            on_close=local.close,
            arena=arena(rank, root, memory, self._announce),
            waiter=LinkWaiter(
                bells, health, clock, links, crowded=crowded, local=len(local.ranks) > 1
            ),
        )
        self.hosts = hosts
        self._local = local.ranks
        self._shares = local.memory is not None
        self._links = links
        self._memory = memoryview(root.file.map)

    def shares_with(self, ranks: Sequence[int]) -> bool:
        """Return whether all `ranks` are local and share memory."""
        return self._shares and self._local.issuperset(ranks)

    def backlog(self, ranks: Sequence[int]) -> bool:
        """Return whether data published for `ranks` is still queued on this rank."""
        links = self._links.by_rank
        return any(r in links and links[r].open and links[r].backlog for r in ranks)

    def audience(self, ranks: Sequence[int]) -> Audience:
        """Return `ranks` in the form that `publish` takes."""
        local = [(r, self._peers.root(r).words) for r in ranks if r in self._local]
        remote = [(i, self._links.by_rank[r]) for i, r in enumerate(ranks) if r not in self._local]
        return _Audience(local, remote)

    def publish(
        self,
        audience: Audience,
        line: int,
        block: int = 0,
        nbytes: int = 0,
        parts: Sequence[tuple[int, int]] | None = None,
        *,
        changes: bool = False,
    ) -> None:
        """Make a line and a block visible to local peers, and send both to remote peers.

        See `MemoryTransport.publish`.
        """
        if audience.local:
            super().publish(audience.local, line)
        if not audience.remote:
            return
        small = [(*_place(line), self._line(line))]
        if not nbytes:
            self._links.send([(link, Writes([], small), ()) for _, link in audience.remote])
            return
        extent, offset = _place(block)
        data = self.arena.piece(self.rank, block, nbytes)
        if changes:
            data = memoryview(bytes(data))
        frames = []
        for position, link in audience.remote:
            start, end = parts[position] if parts else (0, nbytes)
            large = [(extent, offset + start)] if start < end else []
            frames.append((link, Writes(large, small), [data[start:end]] if large else []))
        self._links.send(frames)

    def fds(self) -> list[int]:
        """Return the descriptors that a forked child must not keep."""
        return [*super().fds(), *self._links.fds()]

    def close(self) -> None:
        """Notify the peers that this rank ends, and free all resources. Idempotent."""
        if self.closed:
            return
        if not self.forked:
            if self._root.words[STATE] == RUNNING:
                self._root.words[STATE] = CLOSED
                self.publish(self.audience(sorted(self._links.by_rank)), 0)
            self._links.close(LINGER_S)
        self._memory.release()
        super().close()

    def _line(self, place: int) -> bytes:
        if place >> OFFSET_BITS == ROOT_EXTENT:
            return bytes(self._memory[:LINE_BYTES])
        return bytes(self.arena.piece(self.rank, place, LINE_BYTES))

    def _announce(self, number: int) -> None:
        """Tell remote peers of an extent, since they may get addresses in it from other ranks."""
        offset = ROOT_WORDS_BYTES + 16 * number
        entry = bytes(self._memory[offset : offset + 16])
        writes = Writes([], [(ROOT_EXTENT, offset, entry)])
        self._links.send([(link, writes, ()) for link in self._links.by_rank.values()])


def _place(address: int) -> tuple[int, int]:
    """Return the extent and the first byte of an address."""
    return address >> OFFSET_BITS, (address & (1 << OFFSET_BITS) - 1) * LINE_BYTES
