"""Mirrors of the peers' memory, updated by data that the peers send.

Problem: the algorithms read published data of their peers in place. Where memory cannot be shared,
each algorithm would need a second form that works with messages.

Idea: all shared memory has one writer, its owner, who decides when others may see it (`publish`).
So a rank keeps a *mirror* of each peer's memory, with the received data at the same extents and
offsets. Published data is sent as a list of writes. The algorithms read the mirror in the same way
as shared memory.

    frame   meta      number of large writes, (extent, offset) of each,
                      then small writes (extent, offset, bytes)
            buffers   the data of the large writes, received into the mirror without a copy

The small writes are applied in order once the whole frame has arrived, each under the interpreter's
lock. So a thread that sees a counter also sees the data before it, as with shared memory, on any
processor. Extent 0 is the root.

A mirror holds the data that was sent last, which may be older than the owner's memory. Memory that
must read as zero until its owner publishes it is therefore allocated where memory was never used
(`announced_arena`).
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from braid.errors import CommError, InternalError, PeerLostError
from braid.runtime.transport.memory import MAX_EXTENTS, ROOT_BYTES, MemoryFile, PeerMemory, Root

__all__ = ["ROOT_EXTENT", "MirroredMemory", "Writes", "pack_writes", "unpack_writes"]

_COUNT = struct.Struct("<H")
_PLACE = struct.Struct("<IQ")
_SMALL = struct.Struct("<IQI")
ROOT_EXTENT = 0
ARRIVAL_S = 60.0  # how long to wait until a peer announces an extent that is already in use


class Writes(NamedTuple):
    """Writes to a rank's memory that one frame carries, without the data of the large writes.

    Attributes:
        large: (number of the memory file, offset) of each large write.
        small: (number of the memory file, offset, data) of each small write, in order.
    """

    large: list[tuple[int, int]]
    small: list[tuple[int, int, bytes]]


def pack_writes(writes: Writes) -> bytes:
    """Return `writes` as the metadata of a frame."""
    parts = [_COUNT.pack(len(writes.large))]
    for extent, offset in writes.large:
        parts.append(_PLACE.pack(extent, offset))
    for extent, offset, data in writes.small:
        parts += (_SMALL.pack(extent, offset, len(data)), data)
    return b"".join(parts)


def unpack_writes(meta: bytes) -> Writes:
    """Parse the result of `pack_writes`.

    Raises:
        CommError: The bytes are not the metadata of a frame.
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
        msg = f"{len(meta)} bytes are not a list of writes, since they end within one: {exc}"
        raise CommError(msg) from exc
    if at > len(meta):
        msg = f"{len(meta)} bytes are not a list of writes: {at - len(meta)} bytes are missing"
        raise CommError(msg)
    return Writes(large, small)


class MirroredMemory(PeerMemory):
    """Mirrors of the memory of some peers.

    Args:
        ranks: The peers; this rank is not among them.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._roots = {r: Root(MemoryFile.private(ROOT_BYTES, f"braid-mirror-{r}")) for r in ranks}
        self._extents: dict[tuple[int, int], MemoryFile] = {}
        self._ended: set[int] = set()
        self._news = threading.Condition()

    def root(self, rank: int) -> Root:
        """Return the copy of the root of `rank`, which leads to the other memory of `rank`."""
        return self._roots[rank]

    def extent(self, rank: int, extent_id: int) -> mmap.mmap:
        """Return the copy of memory file `extent_id` of `rank`, once `rank` has announced the file.

        Raises:
            PeerLostError: The connection ended first.
            CommError: The memory file was not announced within a minute.
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
                msg = (
                    f"rank {rank} has ended before it announced its memory: look for the first "
                    "error of that rank"
                )
                raise PeerLostError(msg, rank=rank)
            if not nbytes:
                msg = f"rank {rank} has not announced extent {extent_id} within {ARRIVAL_S:g} s"
                raise CommError(msg)
            file = self._extents.get((rank, extent_id))
            if file is None:
                file = self._extents[rank, extent_id] = MemoryFile.private(
                    nbytes, f"braid-mirror-{rank}"
                )
            return file.map

    def forget(self, rank: int, extent_id: int) -> None:
        """Free the copy of memory file `extent_id`, which `rank` has freed."""
        file = self._extents.pop((rank, extent_id), None)
        if file is not None:
            file.close()

    def targets(self, rank: int, meta: bytes, sizes: Sequence[int]) -> list[memoryview]:
        """Return the memory that receives the large writes of a frame of `rank`.

        `meta` is the metadata of the frame, and `sizes` are the bytes of the writes.

        Raises:
            CommError: A write lies outside the memory of `rank`.
        """
        places = unpack_writes(meta).large
        if len(places) != len(sizes):
            msg = f"rank {rank} sent {len(sizes)} buffers for {len(places)} writes"
            raise CommError(msg)
        return [
            self._target(rank, extent, offset, nbytes)
            for (extent, offset), nbytes in zip(places, sizes, strict=True)
        ]

    def apply(self, rank: int, meta: bytes) -> None:
        """Apply the small writes in the metadata of a frame, after its large writes have arrived.

        Raises:
            CommError: A write lies outside the memory of `rank`.
        """
        news = False
        for extent, offset, data in unpack_writes(meta).small:
            self._target(rank, extent, offset, len(data))[:] = data
            news |= extent == ROOT_EXTENT
        if news:
            with self._news:
                self._news.notify_all()

    def ended(self, rank: int) -> None:
        """Record that `rank` will send no more data."""
        with self._news:
            self._ended.add(rank)
            self._news.notify_all()

    def ring(self, rank: int, slots: int) -> None:
        """Do nothing: the arrival of a frame wakes the peer's waiting threads."""

    def pull(self, rank: int, address: int, out: torch.Tensor) -> None:  # noqa: ARG002 - PeerMemory
        """Raise an error: a mirror cannot be pulled from, and `may_pull` is False for it."""
        msg = f"cannot read private memory of rank {rank}: this rank has only a mirror of it"
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
            msg = f"rank {rank} wrote to the memory with id {extent}, which it has not announced"
            raise CommError(msg)
        if offset + nbytes > len(memory):
            msg = (
                f"rank {rank} wrote {nbytes} bytes at {offset}, outside of its memory with id "
                f"{extent} of {len(memory)} bytes"
            )
            raise CommError(msg)
        return memoryview(memory)[offset : offset + nbytes]
