"""Copies of the peers' memory, kept up to date by what they send.

Problem: the algorithms read what their peers have published in place. Where memory cannot be
shared, each of them would need a second form, over messages.

Idea: everything that ranks share has one writer, its owner, who says when it may be seen
(`publish`). So a rank keeps a *mirror* of the parts of each peer's memory that it has been sent, at
the same extents and offsets. What is published travels as a list of writes; the algorithms read the
mirror and do not know the difference.

    frame   meta      number of large writes, (extent, offset) of each, then small writes (extent, offset, bytes)
            buffers   the data of the large writes, received straight into the mirror

Small writes are done when the whole frame is there, in their order, each at once under the
interpreter's lock; so who sees a counter sees the data before it, as in shared memory, whatever the
processor. Extent 0 is the root.

A place in a mirror holds what was last sent there, not what its owner holds now; what must be zero
until its owner says otherwise is allocated where nothing has ever been (`announced`).
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from braid.errors import CommError, InternalError, PeerLostError
from braid.transport.memory import MAX_EXTENTS, ROOT_BYTES, MemoryFile, PeerMemory, Root

__all__ = ["ROOT_EXTENT", "MirroredMemory", "Writes", "pack_writes", "unpack_writes"]

_COUNT = struct.Struct("<H")
_PLACE = struct.Struct("<IQ")
_SMALL = struct.Struct("<IQI")
ROOT_EXTENT = 0
ARRIVAL_S = (
    60.0  # how long to wait for the announcement of an extent that a peer has spoken of elsewhere
)


class Writes(NamedTuple):
    """What a frame says, without the data of its large writes.

    Attributes:
        large: (extent, offset) of each.
        small: (extent, offset, data) of each, in order.
    """

    large: list[tuple[int, int]]
    small: list[tuple[int, int, bytes]]


def pack_writes(writes: Writes) -> bytes:
    """The meta of a frame."""
    parts = [_COUNT.pack(len(writes.large))]
    for extent, offset in writes.large:
        parts.append(_PLACE.pack(extent, offset))
    for extent, offset, data in writes.small:
        parts += (_SMALL.pack(extent, offset, len(data)), data)
    return b"".join(parts)


def unpack_writes(meta: bytes) -> Writes:
    """Inverse of `pack_writes`.

    Raises:
        CommError: These bytes are none.
    """
    try:
        (count,) = _COUNT.unpack_from(meta)
        at = _COUNT.size
        large = []
        for _ in range(count):
            large.append(_PLACE.unpack_from(meta, at))
            at += _PLACE.size
        small = []
        while at < len(meta):
            extent, offset, nbytes = _SMALL.unpack_from(meta, at)
            at += _SMALL.size
            small.append((extent, offset, meta[at : at + nbytes]))
            at += nbytes
    except struct.error as exc:
        msg = f"expected a list of writes, found {len(meta)} bytes that end within one: {exc}"
        raise CommError(msg) from exc
    if at > len(meta):
        msg = (
            f"expected a list of writes, found {len(meta)} bytes that end {at - len(meta)} too "
            "early"
        )
        raise CommError(msg)
    return Writes(large, small)


class MirroredMemory(PeerMemory):
    """Mirrors of the memory of some peers.

    Args:
        ranks: Which; this rank is none of them.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._roots = {r: Root(MemoryFile.private(ROOT_BYTES, f"braid-mirror-{r}")) for r in ranks}
        self._extents: dict[tuple[int, int], MemoryFile] = {}
        self._ended: set[int] = set()
        self._news = threading.Condition()

    def root(self, rank: int) -> Root:
        """Mirror of the root of `rank`."""
        return self._roots[rank]

    def extent(self, rank: int, extent_id: int) -> mmap.mmap:
        """Mirror of an extent of `rank`; waits until it has been announced.

        Raises:
            PeerLostError: The connection has ended before.
            CommError: It was not announced in time.
        """
        file = self._extents.get((rank, extent_id))
        if file is not None:
            return file.map
        root = self._roots[rank]

        def known() -> bool:
            return bool(root.extent(extent_id).nbytes) or rank in self._ended

        with self._news:
            self._news.wait_for(known, ARRIVAL_S)
            nbytes = root.extent(extent_id).nbytes
            if not nbytes and rank in self._ended:
                msg = f"rank {rank} has ended before it announced its memory"
                raise PeerLostError(msg, rank=rank)
            if not nbytes:
                msg = (
                    f"expected extent {extent_id} of rank {rank} within {ARRIVAL_S:g} s, found "
                    "no such entry"
                )
                raise CommError(msg)
            file = self._extents.get((rank, extent_id))
            if file is None:
                file = self._extents[rank, extent_id] = MemoryFile.private(
                    nbytes, f"braid-mirror-{rank}"
                )
            return file.map

    def forget(self, rank: int, extent_id: int) -> None:
        """Give up the mirror of an extent that `rank` has given back."""
        file = self._extents.pop((rank, extent_id), None)
        if file is not None:
            file.close()

    def targets(self, rank: int, meta: bytes, sizes: Sequence[int]) -> list[memoryview]:
        """Where the large writes of a frame of `rank` go.

        Raises:
            CommError: Outside of its memory.
        """
        places = unpack_writes(meta).large
        if len(places) != len(sizes):
            msg = f"expected {len(places)} buffers from rank {rank}, found {len(sizes)}"
            raise CommError(msg)
        return [
            self._target(rank, extent, offset, nbytes)
            for (extent, offset), nbytes in zip(places, sizes, strict=True)
        ]

    def apply(self, rank: int, meta: bytes) -> None:
        """Do the small writes of a frame of `rank`, whose large ones are done.

        Raises:
            CommError: Outside of its memory.
        """
        news = False
        for extent, offset, data in unpack_writes(meta).small:
            self._target(rank, extent, offset, len(data))[:] = data
            news |= extent == ROOT_EXTENT
        if news:
            with self._news:
                self._news.notify_all()

    def ended(self, rank: int) -> None:
        """Nothing more will come from `rank`."""
        with self._news:
            self._ended.add(rank)
            self._news.notify_all()

    def ring(self, rank: int, slots: int) -> None:
        """Nobody rings across processes: what arrives wakes who waits for it."""

    def pull(self, rank: int, address: int, out: torch.Tensor) -> None:  # noqa: ARG002 - PeerMemory
        """Not possible, and never asked for (`may_pull`)."""
        msg = f"private memory of rank {rank} was to be read, of which there is only a mirror"
        raise InternalError(msg)

    def close(self) -> None:
        """Drop the mirrors."""
        for root in self._roots.values():
            root.close()
        for file in self._extents.values():
            file.close()
        self._extents.clear()

    def _target(self, rank: int, extent: int, offset: int, nbytes: int) -> memoryview:
        memory: mmap.mmap
        if extent == ROOT_EXTENT:
            memory = self._roots[rank].file.map
        elif extent < MAX_EXTENTS and self._roots[rank].extent(extent).nbytes:
            memory = self.extent(rank, extent)
        else:
            msg = (
                f"expected rank {rank} to write to memory that it has announced, found extent "
                f"{extent}"
            )
            raise CommError(msg)
        if offset + nbytes > len(memory):
            msg = (
                f"expected rank {rank} to write inside of its extent {extent} of {len(memory)} "
                f"bytes, found {nbytes} at "
                f"{offset}"
            )
            raise CommError(msg)
        return memoryview(memory)[offset : offset + nbytes]
