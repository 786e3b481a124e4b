"""Tensors in memory that peers can read, each with an address of 64 bits.

Problem: a collective on ordinary tensors copies them into shared slots and out again. Tensors that
are already in shared memory (gradient buckets, flat parameters, slots) need no copy. But every rank
must learn where its peers' tensors are, and if ranks agreed on each allocation, `empty()` would be
a collective.

Idea: each rank allocates memory alone. A `Block` gives a location by (extent, offset), which fits
into an address of 64 bits, one word of the control line that peers read anyway. Peers map an extent
when they first use it. Extents keep their numbers, so the meaning of an address never changes. A
block becomes free when the last tensor that views it is deleted.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from braid.errors import CommError
from braid.runtime.torch_internals import share_descriptor, shared_storage
from braid.runtime.transport.memory import MAX_EXTENTS, Extent, MemoryFile, PeerMemory, Root

__all__ = ["Arena", "Block", "adoptable"]

EXTENT_BYTES = 4 << 20  # small allocations share extents of this size
LINE_BYTES = 64  # a cache line: no two blocks share one
PAGE_BYTES = 4096
SHARED_FILES = "/dev/shm"  # noqa: S108 - where torch puts shared storages
SPARE_BYTES = 1 << 20
OFFSET_BITS = 40  # number of bits for the offset in 64-byte lines: 64 TiB for each extent


class Block(NamedTuple):
    """A piece of one rank's shared memory.

    Attributes:
        extent: Number of the memory file that contains the piece, from 1.
        offset: First byte in the memory file, a multiple of 64.
        nbytes: Length in bytes.
    """

    extent: int
    offset: int
    nbytes: int

    @property
    def address(self) -> int:
        """Address of the block in 64 bits; 0 means no block."""
        return self.extent << OFFSET_BITS | self.offset // LINE_BYTES

    @classmethod
    def at(cls, address: int, nbytes: int) -> Block:
        """Return the block of `nbytes` bytes at an address."""
        offset = (address & (1 << OFFSET_BITS) - 1) * LINE_BYTES
        return cls(address >> OFFSET_BITS, offset, nbytes)


class OwnExtent:
    """A memory file with its list of free pieces, `[(offset, nbytes)]` in order of offset.

    `guest` is the storage of a tensor that was moved here (`Arena.adopt`): it stays at the address
    where torch mapped it, and is freed with the storage.
    """

    def __init__(
        self, number: int, file: MemoryFile, guest: torch.UntypedStorage | None = None
    ) -> None:
        self.number = number
        self.file = file
        if guest is None:
            self.free = [(0, file.nbytes)]
            self.base = ctypes.addressof(ctypes.c_char.from_buffer(file.map))
        else:
            self.free = []
            self.base = guest.data_ptr()
        self._guest: Any = None if guest is None else StorageWeakRef(guest)  # type: ignore[no-untyped-call]

    @property
    def vacated(self) -> bool:
        """Whether the adopted storage has been freed, so that its address may be used again."""
        return self._guest is not None and bool(self._guest.expired())

    def reserve(self, nbytes: int) -> int:
        """Reserve the first free piece that fits; return its offset, -1 if there is none."""
        for index, (offset, room) in enumerate(self.free):
            if room >= nbytes:
                if room == nbytes:
                    del self.free[index]
                else:
                    self.free[index] = (offset + nbytes, room - nbytes)
                return offset
        return -1

    def release(self, offset: int, nbytes: int) -> None:
        """Free a piece and join it with its free neighbours."""
        index = bisect.bisect(self.free, (offset, 0))
        self.free.insert(index, (offset, nbytes))
        if index + 1 < len(self.free) and offset + nbytes == self.free[index + 1][0]:
            nbytes += self.free.pop(index + 1)[1]
            self.free[index] = (offset, nbytes)
        if index and sum(self.free[index - 1]) == offset:
            start, before = self.free.pop(index - 1)
            self.free[index - 1] = (start, before + nbytes)


class Arena:
    """This rank's shared memory, with access to the memory of peers.

    Args:
        rank: Rank that owns the arena.
        root: Root of that rank: the memory whose directory leads peers to its memory files.
        peers: Access to the memory of peers.

    Attributes:
        is_mirrored: Whether some peers have copies of this memory, which may be out of date.
    """

    is_mirrored = False

    def __init__(self, rank: int, root: Root, peers: PeerMemory) -> None:
        self.rank = rank
        self._root = root
        self._peers = peers
        self._lock = threading.Lock()
        self._dead: deque[Block] = deque()  # filled by finalizers, which must not take the lock
        self._extents: list[OwnExtent] = []
        # (bases, extents) in order of base; replaced as one tuple, since `locate` reads it without
        # the lock
        self._by_base: tuple[list[int], list[OwnExtent]] = ([], [])
        self._maps: dict[tuple[int, int], torch.Tensor] = {}
        self._views: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor in shared memory; its block is freed with its last view.

        Raises:
            CommError: There is not enough memory.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        block = self.allocate(nbytes)
        file = self._extents[block.extent - 1].file
        # torch keeps this object as long as the storage, so it is finalized after all views
        holder = (ctypes.c_char * nbytes).from_buffer(file.map, block.offset)
        weakref.finalize(holder, self._dead.append, block).atexit = False
        return torch.frombuffer(holder, dtype=dtype).view(tuple(shape))

    def allocate(self, nbytes: int) -> Block:
        """Reserve `nbytes` bytes, which the caller frees.

        Cost: no communication.
        """
        unit = PAGE_BYTES if nbytes >= PAGE_BYTES else LINE_BYTES
        size = -(-nbytes // unit) * unit
        with self._lock:
            self._collect()
            for extent in self._extents:
                offset = extent.reserve(size)
                if offset >= 0:
                    return Block(extent.number, offset, size)
            extent = self._grow(max(size, EXTENT_BYTES))
            return Block(extent.number, extent.reserve(size), size)

    def fresh(self, nbytes: int) -> Block:
        """Reserve memory that is zero for peers until this rank publishes data in it."""
        return self.allocate(nbytes)

    def adopt(self, x: torch.Tensor) -> None:
        """Move the storage of `x` into shared memory, in place, for all tensors that use it.

        For tensors that other code allocates, such as the gradient buckets of torch's DDP. Torch
        keeps such storages in unlinked files in /dev/shm, so there must be space in /dev/shm.

        Raises:
            CommError: There is not enough space.

        Cost: one copy.
        """
        if self.locate(x):
            return
        storage = x.untyped_storage()
        if not storage.is_shared():
            _require_space(storage.nbytes())
        fd, nbytes = share_descriptor(storage)
        with self._lock:
            self._collect()
            number = self._next_number()
            file = MemoryFile(os.dup(fd), nbytes, keep_fd=True)
            self._enter(OwnExtent(number, file, storage))

    def free(self, block: Block) -> None:
        """Free a block."""
        self._dead.append(block)

    def locate(self, x: torch.Tensor) -> int:
        """Return the address of a contiguous tensor's first byte; 0 if it is not in this arena."""
        address = x.data_ptr()
        bases, extents = self._by_base
        index = bisect.bisect(bases, address) - 1
        if index < 0:
            return 0
        extent = extents[index]
        offset = address - extent.base
        if offset >= extent.file.nbytes or offset % LINE_BYTES or extent.vacated:
            return 0
        return extent.number << OFFSET_BITS | offset // LINE_BYTES

    def origin(self, address: int) -> tuple[int, int, int] | None:
        """Return (rank, extent, byte) of a memory address of this process; used by test tools.

        Returns None for an address outside of shared memory.
        """
        for extent in self._extents:
            if 0 <= address - extent.base < extent.file.nbytes:
                return self.rank, extent.number, address - extent.base
        for (rank, number), tensor in self._maps.items():
            if 0 <= address - tensor.data_ptr() < tensor.numel():
                return rank, number, address - tensor.data_ptr()
        return None

    def view(self, rank: int, address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor over memory of `rank` that begins at `address`.

        The memory is mapped at first use.
        """
        key = (rank, address, numel, dtype)
        tensor = self._views.get(key)
        if tensor is None:
            start = (address & (1 << OFFSET_BITS) - 1) * LINE_BYTES
            extent = self._map(rank, address >> OFFSET_BITS)
            tensor = extent[start : start + numel * dtype.itemsize].view(dtype)
            if len(self._views) > 8192:
                self._views.clear()
            self._views[key] = tensor
        return tensor

    def words(self, rank: int, address: int, count: int) -> memoryview:
        """Return `count` 64-bit words of `rank` that begin at `address`."""
        return self.piece(rank, address, 8 * count).cast("Q")

    def piece(self, rank: int, address: int, nbytes: int) -> memoryview:
        """Return `nbytes` bytes of `rank` that begin at `address`."""
        start = (address & (1 << OFFSET_BITS) - 1) * LINE_BYTES
        extent_map = (
            self._extents[(address >> OFFSET_BITS) - 1].file.map
            if rank == self.rank
            else self._peers.extent(rank, address >> OFFSET_BITS)
        )
        return memoryview(extent_map)[start : start + nbytes]

    def fds(self) -> list[int]:
        """Return the descriptors of this arena's memory files."""
        return [extent.file.fd for extent in self._extents if extent.file.fd >= 0]

    def statistics(self) -> dict[str, int]:
        """Return bytes reserved and in use, and numbers of files of this rank and of peers."""
        with self._lock:
            self._collect()
            total = sum(e.file.nbytes for e in self._extents if not e.vacated)
            free = sum(room for e in self._extents for _, room in e.free)
        peers = sum(rank != self.rank for rank, _ in self._maps)
        return {
            "reserved_bytes": total,
            "used_bytes": total - free,
            "num_extents": len(self._extents),
            "num_peer_extents": peers,
        }

    def close(self) -> None:
        """Close all descriptors; memory is unmapped with the last tensor that uses it."""
        with self._lock:
            self._views.clear()
            self._maps.clear()
            for extent in self._extents:
                extent.file.close()

    def _collect(self) -> None:
        while self._dead:
            block = self._dead.popleft()
            self._extents[block.extent - 1].release(block.offset, block.nbytes)
        for extent in self._extents:
            if extent.vacated and extent.file.fd >= 0:
                self._root.publish(extent.number, Extent(0, 0))
                extent.file.close()

    def _grow(self, nbytes: int) -> OwnExtent:
        number = self._next_number()
        return self._enter(OwnExtent(number, self._new_file(-(-nbytes // PAGE_BYTES) * PAGE_BYTES)))

    def _new_file(self, nbytes: int) -> MemoryFile:
        return MemoryFile.create(nbytes, f"braid-arena-{self.rank}")

    def _next_number(self) -> int:
        number = len(self._extents) + 1
        if number >= MAX_EXTENTS:
            msg = (
                f"rank {self.rank} has allocated {MAX_EXTENTS} blocks of shared memory, the "
                "limit: allocate one large tensor instead of many small ones"
            )
            raise CommError(msg)
        return number

    def _enter(self, extent: OwnExtent) -> OwnExtent:
        self._extents.append(extent)
        in_order = sorted((e for e in self._extents if not e.vacated), key=lambda e: e.base)
        self._by_base = ([e.base for e in in_order], in_order)
        self._root.publish(extent.number, Extent(max(0, extent.file.fd), extent.file.nbytes))
        return extent

    def _map(self, rank: int, number: int) -> torch.Tensor:
        tensor = self._maps.get((rank, number))
        if tensor is None:
            if rank != self.rank:
                self._forget_vacated(rank)
            memory = (
                self._extents[number - 1].file.map
                if rank == self.rank
                else self._peers.extent(rank, number)
            )
            tensor = self._maps[rank, number] = torch.frombuffer(memory, dtype=torch.uint8)
        return tensor

    def _forget_vacated(self, rank: int) -> None:
        """Unmap extents that `rank` has freed, such as the buckets of a deleted model."""
        root = self._peers.root(rank)
        gone = {
            key for key in list(self._maps) if key[0] == rank and not root.extent(key[1]).nbytes
        }
        for view in [v for v in list(self._views) if (v[0], v[1] >> OFFSET_BITS) in gone]:
            self._views.pop(view, None)
        for key in gone:
            self._maps.pop(key, None)
            self._peers.forget(*key)


def adoptable(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that `Arena.adopt` can move into shared memory without a copy.

    If the arena is closed, the next arena of this process can adopt it.

    The tensor needs no space in /dev/shm.

    Raises:
        CommError: There is not enough memory.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    file = MemoryFile.create(nbytes, "braid-adoptable")
    storage = shared_storage(file.fd, nbytes)
    file.close()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage).view(tuple(shape))


def _require_space(nbytes: int) -> None:
    """Raise if there is not enough space; otherwise torch would get a bus error in a later step."""
    space = os.statvfs(SHARED_FILES)
    free = space.f_bavail * space.f_frsize
    if free < nbytes + SPARE_BYTES:
        msg = (
            f"{SHARED_FILES} has {free:,} bytes free, not enough for {nbytes:,} "
            f"({SPARE_BYTES:,} must stay free): enlarge it (docker run --shm-size), or allocate "
            "the tensor with Group.empty, which does not need it"
        )
        raise CommError(msg)
