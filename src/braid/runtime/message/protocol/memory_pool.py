"""Memory for arriving buffers, used again when its last view is gone.

Problem: each large message in new memory costs more for the pages than for the copy. The system
clears a page at its first use and takes it back when the message is dropped, so a stream of 16 MiB
messages runs at a quarter of the speed of memory.

Idea: a block is lent as a memoryview. All views that the program makes of it (slices, arrays,
tensors) keep one small owner object alive. When that object dies, its block is free again, without
any call of the program. Blocks have huge pages where the system offers them, and nobody clears them
between two messages. Few bytes are kept, so that a large message does not occupy memory for ever.

Source: the slab allocator (J. Bonwick, USENIX 1994) for the use of warm memory again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections import deque

__all__ = ["MemoryPool"]

LEAST_BYTES = 256 << 10  # smaller buffers come from the interpreter's own allocator
KEPT_BYTES = 64 << 20  # of free blocks
_ROUND_BYTES = 64 << 10  # messages of nearly the same size share blocks
_HUGE_PAGE_BYTES = 2 << 20


class MemoryPool:
    """Lends writable memory; one for each van. Views may be dropped in any thread.

    Attributes:
        free: Blocks that nobody uses, the oldest first.
    """

    def __init__(self) -> None:
        self.free: deque[mmap.mmap] = deque()

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
        weakref.finalize(owner, _recycle, self.free, block).atexit = False
        return memoryview(owner).cast("B")[:size]

    def _take(self, size: int) -> mmap.mmap | None:
        """Remove a free block for `size` bytes of which at most half would be wasted."""
        for block in tuple(self.free):
            if size <= len(block) <= 2 * size:
                with contextlib.suppress(ValueError):  # another thread was quicker
                    self.free.remove(block)
                    return block
        return None


def _new_block(size: int) -> mmap.mmap:
    rounded = -(-size // _ROUND_BYTES) * _ROUND_BYTES
    # Private: a forked process must not see what arrives here later.
    block = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _recycle(free: deque[mmap.mmap], block: mmap.mmap) -> None:
    """Add a block that nobody uses; drop the oldest ones beyond the limit.

    Without a lock, because the last view may be dropped anywhere, also inside of `lend`.
    """
    if len(block) > KEPT_BYTES:
        return
    free.append(block)
    while sum(map(len, tuple(free))) > KEPT_BYTES:
        with contextlib.suppress(IndexError):
            free.popleft()
