"""Dynamic self-scheduling of blocks of work over a shared atomic counter.

Problem: with a fixed share for each member, all members wait for the slowest, such as one that came
late or whose core another process uses.

Idea: blocks are numbered, and a counter holds the number of the next block. A member that is free
increments the counter atomically and does the block whose number it found:

    member 0, late       ........................ 4 6 |
    member 1             0 1 2 3 . . . . . . . .  5 7 |

When no blocks are left, each member has incremented the counter once more than it did blocks. So a
work of b blocks moves the counter by b + n, the next work begins there, and nobody resets it.

Source: Tang and Yew, "Processor Self-Scheduling for Multiple-Nested Parallel Loops" (1986).
"""

from __future__ import annotations

from collections.abc import Iterator

from braid.runtime.transport.atomic import MASK, fetch_add

__all__ = ["WorkCounter"]


class WorkCounter:
    """One member's access to the counter that all members share.

    Args:
        address: Address of the counter, a word of 32 bits that is 0 when the members begin.
        size: Number of members.
    """

    __slots__ = ("_address", "_first", "_size")

    def __init__(self, address: int, size: int) -> None:
        self._address = address
        self._size = size
        self._first = 0  # what the counter holds when a work begins

    def blocks(self, count: int) -> Iterator[int]:
        """Yield the numbers of the blocks that this member does, out of 0 to `count - 1`.

        All members give the same count, exhaust the iterator, and have done so before one of them
        begins the next work.
        """
        while (number := fetch_add(self._address, 1) - self._first & MASK) < count:
            yield number
        self._first = self._first + count + self._size & MASK
