"""Arenas of which peers keep mirrors: peers are told of each new extent.

A mirror is zero where nothing has been sent. Slots are never read before they have been published,
but a group's first page is: its members learn of it through the store or another group. It is
therefore allocated where nothing has ever been (`AnnouncedArena.fresh`), so that it is zero
everywhere until its owner publishes something else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from braid.runtime.transport.arena import EXTENT_BYTES, LINE_BYTES, Arena, Block, OwnExtent
from braid.runtime.transport.memory import MemoryFile, PeerMemory, Root

__all__ = ["AnnouncedArena", "PrivateArena"]


class AnnouncedArena(Arena):
    """An arena of which some peers keep a mirror.

    Args:
        rank: Rank that owns the arena.
        root: Root of that rank.
        peers: Mirrors of the peers' memory.
        announce: Called with the number of a new extent, before anything in it is given out.
    """

    is_mirrored = True

    def __init__(
        self, rank: int, root: Root, peers: PeerMemory, announce: Callable[[int], None]
    ) -> None:
        super().__init__(rank, root, peers)
        self._announce = announce
        self._untouched: tuple[int, int] = (0, EXTENT_BYTES)  # extent, first byte nobody has had

    def fresh(self, nbytes: int) -> Block:
        """Reserve memory that has never been given out before."""
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
    """An arena in ordinary memory, of which peers can read only what is published."""

    def adopt(self, x: torch.Tensor) -> None:
        """Leave `x` where it is: there is no better place."""

    def locate(self, x: torch.Tensor) -> int:  # noqa: ARG002 - as in Arena
        """Return 0: peers cannot read tensors of this rank."""
        return 0

    def _new_file(self, nbytes: int) -> MemoryFile:
        return MemoryFile.private(nbytes, f"braid-arena-{self.rank}")
