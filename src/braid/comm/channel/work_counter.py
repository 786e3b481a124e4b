"""Dynamic self-scheduling of blocks of work over a shared atomic counter.

Problem: if each member has a fixed share, all members wait for the slowest, such as a member that
arrived late or that shares its core with another process.

Idea: blocks are numbered, and a counter holds the number of the next block. An idle member
increments the counter atomically and processes the block with the previous number:

    member 0, late       ........................ 4 6 |
    member 1             0 1 2 3 . . . . . . . .  5 7 |

When no blocks remain, each member has incremented the counter once more than its number of blocks.
So b blocks and n members move the counter by b + n. The next loop begins at that value, and no
member resets the counter.

Source: Tang and Yew, "Processor Self-Scheduling for Multiple-Nested Parallel Loops" (1986).
"""

from __future__ import annotations

from collections.abc import Iterator

from braid.runtime.transport.atomic import MASK, fetch_add

__all__ = ["WorkCounter"]


class WorkCounter:
    """One member's access to the shared counter that gives blocks of work to members.

    Args:
        address: Address of the counter, a 32-bit word that is 0 initially.
        size: Number of members.
    """

    __slots__ = ("_address", "_first", "_size")

    def __init__(self, address: int, size: int) -> None:
        self._address = address
        self._size = size
        self._first = 0  # value of the counter when a loop begins

    def blocks(self, count: int) -> Iterator[int]:
        """Yield the numbers of this member's blocks, out of 0 to `count - 1`.

        All members pass the same count and exhaust the iterator before any of them begins the next
        loop.
        """
        while (number := fetch_add(self._address, 1) - self._first & MASK) < count:
            yield number
        self._first = self._first + count + self._size & MASK
