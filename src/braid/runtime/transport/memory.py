"""Memory that other ranks can map: one root per rank, and extents.

Problem: collectives inside a host are copies between processes, so the tensors (or copies of them
in slots) must be in memory that all ranks can access. Files in /dev/shm are limited (64 MiB in a
container) and are left behind after `kill -9`.

Idea: every rank makes anonymous files (`memfd_create`). They have no name, count as ordinary memory
and are freed with the last process that maps them. A peer opens them through
`/proc/<pid>/fd/<fd>`, which the kernel permits to the same user; where it does not (other pid
namespace, hardened host) the descriptor is passed over a socket instead (`descriptor_service`).

The first file of a rank is its *root*, which leads to all others:

    root   +--------------------+------------------------------+---------------------------------+
           | words (4 KiB)      | extents: (fd, bytes) by id   | names: operations, call sites    |
           +--------------------+------------------------------+---------------------------------+

Only the owner writes words, except for counters that one instruction changes (`atomic`). 64-bit
aligned stores are atomic, and x86 keeps the order of stores, so a peer that sees a word also sees
all data written before it. Where that does not hold (`has_ordered_stores`), and where ranks cannot
open each other's memory, ranks keep copies of the data instead: see `hosts`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from braid.errors import CommError, PeerLostError
from braid.runtime.events import NameTable
from braid.runtime.transport.pull import pull

__all__ = [
    "Extent",
    "MappedMemory",
    "MemoryFile",
    "PeerMemory",
    "Root",
    "RootAddress",
    "has_ordered_stores",
    "open_through_proc",
]

MAX_EXTENTS = 4096
ROOT_WORDS_BYTES = 4096
DIRECTORY_BYTES = MAX_EXTENTS * 16
NAMES_BYTES = 256 << 10
NAMES_START = ROOT_WORDS_BYTES + DIRECTORY_BYTES
ROOT_BYTES = NAMES_START + NAMES_BYTES

MAGIC = int.from_bytes(b"BRAIDRT1", "little")

# root words
PID, STATE, SLEEPERS, MARK, BASE = 0, 1, 2, 3, 4
# values of STATE: they show a peer of an ended process whether this was on purpose
RUNNING, LEFT, CLOSED = 0, 1, 2


def has_ordered_stores() -> bool:
    """Return whether other processors see plain stores in program order (x86-64 Linux)."""
    return platform.machine() in {"x86_64", "AMD64"} and sys.platform.startswith("linux")


class MemoryFile:
    """An anonymous file in memory, mapped into this process.

    Args:
        fd: Descriptor to map; -1 for memory that only this process can access.
        nbytes: Length.
        keep_fd: Whether the descriptor stays open, so that peers can open the file through it.
    """

    def __init__(self, fd: int, nbytes: int, *, keep_fd: bool) -> None:
        self.nbytes = nbytes
        populate = getattr(mmap, "MAP_POPULATE", 0)  # page faults now, not inside a collective
        flags = mmap.MAP_SHARED | populate if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self.map = mmap.mmap(fd, nbytes, flags=flags)
        except OSError:
            if fd >= 0:
                os.close(fd)
            raise
        self.fd = fd
        if fd >= 0 and not keep_fd:
            os.close(fd)
            self.fd = -1

    @classmethod
    def create(cls, nbytes: int, name: str) -> MemoryFile:
        """Make a new file of `nbytes` zero bytes, and reserve memory for all of them.

        Raises:
            CommError: There is not enough memory.
        """
        _require_memory(nbytes, name)
        fd = _anonymous_file(name)
        try:
            os.ftruncate(fd, nbytes)
            if hasattr(os, "posix_fallocate"):
                # reserves the pages: a clear error now instead of a bus error later
                os.posix_fallocate(fd, 0, nbytes)
        except OSError as exc:
            os.close(fd)
            msg = (
                f"there is not enough shared memory for {nbytes} bytes of {name} "
                f"({exc.strerror}): use a smaller model or bucket, or fewer ranks on this host"
            )
            raise CommError(msg) from exc
        try:
            return cls(fd, nbytes, keep_fd=True)
        except (OSError, OverflowError) as exc:
            msg = (
                f"the address space of this process has no room for {nbytes:,} more bytes of "
                f"{name} ({exc}): raise its limit (ulimit -v), or use a smaller model or bucket"
            )
            raise CommError(msg) from exc

    @classmethod
    def private(cls, nbytes: int, name: str) -> MemoryFile:
        """Make zeroed memory that no other process can open; its pages are allocated when used.

        Raises:
            CommError: There is not enough memory.
        """
        _require_memory(nbytes, name)
        try:
            return cls(-1, nbytes, keep_fd=False)
        except (OSError, OverflowError) as exc:
            msg = (
                f"there is not enough memory for {nbytes:,} bytes of {name} ({exc}): use a "
                "smaller model or bucket, or fewer ranks on this host"
            )
            raise CommError(msg) from exc

    def close(self) -> None:
        """Close the descriptor, and the mapping if no tensor uses it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        # a tensor or view may still use the mapping: it is then unmapped when the last one dies
        with contextlib.suppress(BufferError):
            self.map.close()


class Extent(NamedTuple):
    """Descriptor of a memory file in its owner's process, and its length in bytes."""

    fd: int
    nbytes: int


class RootAddress(NamedTuple):
    """Location of a rank's root, the shared memory in which other ranks find its other memory.

    The rank publishes the location in the store of the job.

    Attributes:
        pid: Process id.
        started: Start time of the process in clock ticks since boot. It shows whether the kernel
            has given the pid to another process since.
        fd: Descriptor of the root in that process.
        bells: Descriptors of the write ends of the pipes that wake the rank's threads.
    """

    pid: int
    started: int
    fd: int
    bells: tuple[int, ...]

    def to_text(self) -> str:
        """Write the address as `pid:started:fd:bell,bell`."""
        return f"{self.pid}:{self.started}:{self.fd}:{','.join(map(str, self.bells))}"

    @classmethod
    def from_text(cls, text: str) -> RootAddress:
        """Parse the result of `to_text`."""
        pid, started, fd, bells = text.split(":")
        return cls(int(pid), int(started), int(fd), tuple(int(b) for b in bells.split(",") if b))


class Root:
    """First memory file of a rank, which leads to its other memory.

    It belongs to this rank, is a peer's mapped file, or is a copy of a peer's file.
    """

    def __init__(self, file: MemoryFile) -> None:
        self.file = file
        view = memoryview(file.map)
        self.words = view[:ROOT_WORDS_BYTES].cast("Q")
        self.directory = view[ROOT_WORDS_BYTES:NAMES_START].cast("Q")
        self.names = NameTable(view[NAMES_START:ROOT_BYTES], threading.Lock())
        self._view = view

    @classmethod
    def create(cls, rank: int) -> Root:
        """Make the root of `rank`, this process: memory in which peers find its other memory."""
        root = cls(MemoryFile.create(ROOT_BYTES, f"braid-root-{rank}"))
        root.words[PID] = os.getpid()
        root.words[BASE] = ctypes.addressof(ctypes.c_char.from_buffer(root.file.map))
        root.words[MARK] = MAGIC
        return root

    def publish(self, extent_id: int, extent: Extent) -> None:
        """Add a memory file to the directory; its length goes last, since peers read that first."""
        self.directory[2 * extent_id] = extent.fd
        self.directory[2 * extent_id + 1] = extent.nbytes

    def extent(self, extent_id: int) -> Extent:
        """Return the memory file of this number; its length is 0 if it does not exist."""
        return Extent(int(self.directory[2 * extent_id]), int(self.directory[2 * extent_id + 1]))

    def close(self) -> None:
        """Drop all views and the mapping."""
        self.names.release()
        self.directory.release()
        self.words.release()
        self._view.release()
        self.file.close()


class PeerMemory(Protocol):
    """Access of a rank to peers' memory; for processes, for threads, and through mirrors."""

    def root(self, rank: int) -> Root:
        """Return the root of `rank` (maybe this one), which leads to the other memory of `rank`."""
        ...

    def extent(self, rank: int, extent_id: int) -> mmap.mmap:
        """Return the mapping of memory file `extent_id` of `rank`."""
        ...

    def forget(self, rank: int, extent_id: int) -> None:
        """Unmap memory file `extent_id`, which `rank` has freed, when no tensor uses it."""
        ...

    def ring(self, rank: int, slots: int) -> None:
        """Wake the waiting threads of `rank` that have their bits set in `slots`."""
        ...

    def pull(self, rank: int, address: int, out: torch.Tensor) -> None:
        """Fill `out` from private memory of `rank` at `address`, if the kernel permits it."""
        ...

    def close(self) -> None:
        """Unmap everything."""
        ...


class MappedMemory:
    """Memory of peers, mapped at first use through their owners' descriptors.

    Args:
        addresses: Root address of each rank.
        open_fd: Opens a peer's descriptor: (rank, number, flags) -> fd. It is `open_through_proc`
            or the client of a descriptor service.
    """

    def __init__(
        self, addresses: dict[int, RootAddress], open_fd: Callable[[int, int, int], int]
    ) -> None:
        self._addresses = addresses
        self._open_fd = open_fd
        self._lock = threading.Lock()
        self._roots: dict[int, Root] = {}
        self._extents: dict[tuple[int, int], MemoryFile] = {}
        self._bells: dict[tuple[int, int], int] = {}

    def root(self, rank: int) -> Root:
        """Return the root of `rank`, which leads to the other memory of `rank`."""
        root = self._roots.get(rank)
        if root is None:
            with self._lock:
                root = self._roots.get(rank)
                if root is None:
                    extent = Extent(self._addresses[rank].fd, ROOT_BYTES)
                    root = self._roots[rank] = self._check(rank, self._open(rank, extent))
        return root

    def extent(self, rank: int, extent_id: int) -> mmap.mmap:
        """Return the mapping of memory file `extent_id` of `rank`."""
        extent = self.root(rank).extent(extent_id)
        if not extent.nbytes:
            msg = f"rank {rank} has no memory with id {extent_id}"
            raise CommError(msg)
        with self._lock:
            file = self._extents.get((rank, extent_id))
            if file is None:
                file = self._extents[rank, extent_id] = self._open(rank, extent)
        return file.map

    def forget(self, rank: int, extent_id: int) -> None:
        """Unmap memory file `extent_id`, which `rank` has freed, when no tensor uses it."""
        with self._lock:
            file = self._extents.pop((rank, extent_id), None)
        if file is not None:
            file.close()

    def ring(self, rank: int, slots: int) -> None:
        """Write a byte into each doorbell (pipe) of `rank` that has its bit set in `slots`."""
        for slot, number in enumerate(self._addresses[rank].bells):
            if slots >> slot & 1:
                # pipe full: the thread wakes anyway; broken or lost: its pidfd reports the end
                with contextlib.suppress(BlockingIOError, BrokenPipeError, PeerLostError):
                    os.write(self._bell(rank, slot, number), b"!")

    def pull(self, rank: int, address: int, out: torch.Tensor) -> None:
        """Fill `out` from private memory of `rank` at `address`, if the kernel permits it."""
        pull(rank, self._addresses[rank].pid, address, out)

    def close(self) -> None:
        """Unmap everything."""
        for root in self._roots.values():
            root.close()
        for file in self._extents.values():
            file.close()
        for fd in self._bells.values():
            os.close(fd)
        self._roots.clear()
        self._extents.clear()
        self._bells.clear()

    def _check(self, rank: int, file: MemoryFile) -> Root:
        """Return the root; raise if it is not the one that `rank` published.

        In another pid namespace the pid belongs to another process, whose descriptor may be any
        file.
        """
        root = Root(file)
        if root.words[MARK] != MAGIC or root.words[PID] != self._addresses[rank].pid:
            root.close()
            msg = (
                f"descriptor {self._addresses[rank].fd} of pid {self._addresses[rank].pid} is "
                "not the memory of a rank"
            )
            raise PermissionError(msg)
        return root

    def _bell(self, rank: int, slot: int, number: int) -> int:
        with self._lock:
            fd = self._bells.get((rank, slot))
            if fd is None:
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
                fd = self._bells[rank, slot] = self._open_fd(rank, number, flags)
        return fd

    def _open(self, rank: int, extent: Extent) -> MemoryFile:
        fd = self._open_fd(rank, extent.fd, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(fd).st_size < extent.nbytes:
            os.close(fd)
            msg = (
                f"descriptor {extent.fd} of rank {rank} is shorter than the {extent.nbytes} "
                "bytes it should have"
            )
            raise PermissionError(msg)
        return MemoryFile(fd, extent.nbytes, keep_fd=False)


def _require_memory(nbytes: int, name: str) -> None:
    """Raise if memory is short; otherwise the kernel could grant it and kill a process later."""
    with contextlib.suppress(ValueError, OSError):  # not every system knows it
        if nbytes <= os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE:
            return
    import psutil  # noqa: PLC0415 - takes 8 ms, and counts what caches would give back

    free = psutil.virtual_memory().available
    if nbytes > free:
        msg = (
            f"this host has {free:,} bytes of free memory, not enough for {nbytes:,} bytes of "
            f"{name}: use a smaller model or bucket, or fewer ranks on this host"
        )
        raise CommError(msg)


def _anonymous_file(name: str) -> int:
    """Make a file without a name: in memory on Linux, a deleted temporary file elsewhere."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


def open_through_proc(addresses: dict[int, RootAddress]) -> Callable[[int, int, int], int]:
    """Return a function that opens descriptors of peers through `/proc/<pid>/fd`.

    The kernel permits it to processes of the same user.
    """

    def open_fd(rank: int, number: int, flags: int) -> int:
        pid = addresses[rank].pid
        try:
            return os.open(f"/proc/{pid}/fd/{number}", flags)
        except (FileNotFoundError, ProcessLookupError, PermissionError) as exc:
            if isinstance(exc, PermissionError) and _has_memory(pid):
                raise
            msg = f"rank {rank} (pid {pid}) is gone: its memory can no longer be opened"
            raise PeerLostError(msg, rank=rank) from exc

    return open_fd


def _has_memory(pid: int) -> bool:
    """Return whether a process still runs; while it exits, only root can open its descriptors."""
    try:
        return not Path(f"/proc/{pid}/statm").read_text().startswith("0 ")
    except OSError:
        return False
