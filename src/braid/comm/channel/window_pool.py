"""Pool of window memory, lent to operations while they are in progress.

Problem: a window of some MiB for each persistent request would take more memory than the gradients,
and few requests are in progress at the same time.

Idea: a rank that ends an operation takes one more step without waiting for it. Its window may be
lent again as soon as all members have taken that step: then no member reads it. The check is cheap,
and is made when a window is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from braid.runtime.transport import Block
from braid.runtime.transport.arena import Arena

__all__ = ["WindowPool"]

KEPT = 4  # unread windows to keep although they are too small for the request


class _Returned(NamedTuple):
    """Window of an operation that has ended on this rank, and a check if it has ended on all."""

    block: Block
    free: Callable[[], bool]


class WindowPool:
    """Pool of the shared memory that one rank uses for collectives of a group.

    Args:
        arena: Arena in which they are allocated.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._returned: list[_Returned] = []
        self._lent: list[Block] = []

    def borrow(self, nbytes: int) -> Block:
        """Return the smallest free window of at least `nbytes` bytes, or a new window."""
        with self._lock:
            free = sorted((r for r in self._returned if r.free()), key=lambda r: r.block.nbytes)
            fitting = next((r for r in free if r.block.nbytes >= nbytes), None)
            if fitting is not None:
                self._returned.remove(fitting)
                block = fitting.block
            else:
                for spare in free[: max(0, len(free) - KEPT)]:
                    self._returned.remove(spare)
                    self._arena.free(spare.block)
                block = self._arena.allocate(nbytes)
            self._lent.append(block)
            return block

    def give_back(self, block: Block, free: Callable[[], bool]) -> None:
        """Return a borrowed window to the pool, which lends it again once `free()` is True."""
        with self._lock:
            self._lent.remove(block)
            self._returned.append(_Returned(block, free))

    def close(self) -> None:
        """Free all windows, including the windows of failed operations."""
        with self._lock:
            for block in (*self._lent, *(r.block for r in self._returned)):
                self._arena.free(block)
            self._lent.clear()
            self._returned.clear()
