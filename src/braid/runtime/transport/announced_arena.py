"""Arenas that peers mirror: each new extent is announced to peers.

A mirror is zero where no data has been sent. Slots are read only after they have been published,
but a group's first page is read before: members learn of it through the store or another group. It
is therefore allocated in memory that was never used (`AnnouncedArena.fresh`), so that it is zero
until its owner publishes it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from braid.runtime.transport.arena import EXTENT_BYTES, LINE_BYTES, Arena, Block, OwnExtent
from braid.runtime.transport.memory import MemoryFile, PeerMemory, Root

__all__ = ["AnnouncedArena", "PrivateArena"]


class AnnouncedArena(Arena):
    """Shared memory of a rank that some peers, such as peers on other hosts, keep copies of.

    Args:
        rank: Rank that owns the arena.
        root: Root of that rank: the memory in which peers find its other memory.
        peers: Mirrors of the peers' memory.
        announce: Called with the number of a new memory file, before the file is used.
    """

    is_mirrored = True

    def __init__(
        self, rank: int, root: Root, peers: PeerMemory, announce: Callable[[int], None]
    ) -> None:
        super().__init__(rank, root, peers)
        self._announce = announce
        self._untouched: tuple[int, int] = (0, EXTENT_BYTES)  # extent, first byte never used

    def fresh(self, nbytes: int) -> Block:
        """Reserve memory that has never been used."""
        size = -(-nbytes // LINE_BYTES) * LINE_BYTES
        with self._lock:
            number, offset = self._untouched
            if offset + size > EXTENT_BYTES:
                extent = self._grow(EXTENT_BYTES)
                number, offset = extent.number, extent.reserve(EXTENT_BYTES)
            self._untouched = (number, offset + size)
            return Block(number, offset, size)

    def _enter(self, extent: OwnExtent) -> OwnExtent:
        entered = super()._enter(extent)
        self._announce(extent.number)
        return entered


class PrivateArena(AnnouncedArena):
    """An arena in ordinary memory; peers see only the parts that are published."""

    def adopt(self, x: torch.Tensor) -> None:
        """Do nothing: `x` needs no shared memory."""

    def locate(self, x: torch.Tensor) -> int:  # noqa: ARG002 - as in Arena
        """Return 0: peers cannot read tensors of this rank."""
        return 0

    def _new_file(self, nbytes: int) -> MemoryFile:
        return MemoryFile.private(nbytes, f"braid-arena-{self.rank}")
