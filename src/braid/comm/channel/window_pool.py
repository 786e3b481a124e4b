"""Memory for windows, lent while an operation is under way: many requests, few of which are ever under way at once, share it.

Problem: a window of some MiB for each persistent request would take more memory than the gradients
themselves.

Idea: whoever ends an operation takes one more step that nobody waits for. Its window may be lent
again, to whatever comes next, as soon as all members have taken theirs: then nobody reads it any
more. Looking is cheap, and done when a window is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from braid.transport import Block
from braid.transport.arena import Arena

__all__ = ["Windows"]

KEPT = 4  # that nobody reads any more and that are too small for what is asked for; the rest is given back


class _Returned(NamedTuple):
    """A window whose operation has ended here, and whether it has everywhere."""

    block: Block
    free: Callable[[], bool]


class Windows:
    """The windows of one group on one rank.

    Args:
        arena: Where they lie.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._returned: list[_Returned] = []
        self._lent: list[Block] = []

    def borrow(self, nbytes: int) -> Block:
        """The smallest window of at least `nbytes` bytes that nobody reads any more, or a new one."""
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
        """Take back a borrowed window; it is lent again when `free()` holds."""
        with self._lock:
            self._lent.remove(block)
            self._returned.append(_Returned(block, free))

    def close(self) -> None:
        """Give everything back to the arena, what failed operations have kept, too."""
        with self._lock:
            for block in (*self._lent, *(r.block for r in self._returned)):
                self._arena.free(block)
            self._lent.clear()
            self._returned.clear()
