"""Pool of memory for arriving buffers, reused when the last view of a buffer is gone.

Problem: for a large message in new memory, the pages cost more than the copy. The system clears a
page at its first use and takes it back when the message is dropped, so a stream of 16 MiB messages
runs at a quarter of the speed of memory.

Idea: a block is lent as a memoryview. All views that the program makes of it (slices, arrays,
tensors) keep one small owner object alive. When that object dies, its block is free again, without
any call by the program. Blocks have huge pages if the system offers them, and are not cleared
between two messages. The number of kept bytes is limited, so that a large message does not occupy
memory permanently.

Source: the slab allocator (J. Bonwick, USENIX 1994) for reuse of warm memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections import deque

__all__ = ["HUGE_PAGE_BYTES", "MemoryPool"]

LEAST_BYTES = 256 << 10  # smaller buffers come from the interpreter's own allocator
KEPT_BYTES = 64 << 20  # of all free blocks together
HUGE_PAGE_BYTES = 2 << 20
_ROUND_BYTES = 64 << 10  # messages of nearly the same size share blocks


class MemoryPool:
    """Lender of writable memory. Views may be dropped in any thread.

    Args:
        kept_bytes: Largest size of all free blocks together.

    Attributes:
        free: Unused blocks, the oldest first.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.free: deque[mmap.mmap] = deque()
        self._kept_bytes = kept_bytes

    def lend(self, size: int) -> memoryview:
        """Return writable memory of `size` bytes with any content.

        Raises:
            MemoryError: The system has no memory.
            OSError: The system refuses another mapping.
        """
        if size < LEAST_BYTES:
            return memoryview(bytearray(size))
        block = self._take(size) or _new_block(size)
        owner = (ctypes.c_ubyte * len(block)).from_buffer(block)
        weakref.finalize(owner, _recycle, self.free, block, self._kept_bytes).atexit = False
        return memoryview(owner).cast("B")[:size]

    def _take(self, size: int) -> mmap.mmap | None:
        """Remove a free block for `size` bytes, if at most half of it would be wasted."""
        for block in tuple(self.free):
            if size <= len(block) <= 2 * size:
                with contextlib.suppress(ValueError):  # another thread was quicker
                    self.free.remove(block)
                    return block
        return None


def _new_block(size: int) -> mmap.mmap:
    rounded = -(-size // _ROUND_BYTES) * _ROUND_BYTES
    # private: a forked process must not see data that arrives later
    block = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _recycle(free: deque[mmap.mmap], block: mmap.mmap, kept_bytes: int) -> None:
    """Add an unused block; drop the oldest ones beyond the limit.

    Uses no lock, since the last view may be dropped anywhere, even inside `lend`.
    """
    if len(block) > kept_bytes:
        return
    free.append(block)
    while sum(map(len, tuple(free))) > kept_bytes:
        with contextlib.suppress(IndexError):
            free.popleft()
