"""Who does which block of a work that any member could do: whoever has time for it.

Problem: with a fixed share for each member, all of them wait for the slowest: one that came late,
or whose core somebody else uses, too.

Idea: blocks are numbered, and a counter says which is the next; whoever is free adds one to it, in
one instruction that nobody can get in between, and does the block whose number was there.

    member 0, late       ........................ 4 6 |
    member 1             0 1 2 3 . . . . . . . .  5 7 |

Every member adds one more than it finds blocks, when there are none left. So a work of b blocks
moves the counter by b + n, the next begins there, and nobody has to set it back.

Source: Tang and Yew, "Processor Self-Scheduling for Multiple-Nested Parallel Loops" (1986).
"""

from __future__ import annotations

from collections.abc import Iterator

from braid.transport.atomic import MASK, fetch_add

__all__ = ["WorkCounter"]


class WorkCounter:
    """One member's way to the counter that all share.

    Args:
        address: Of the counter, a word of 32 bits that is 0 when the members begin.
        size: Number of members.
    """

    __slots__ = ("_address", "_first", "_size")

    def __init__(self, address: int, size: int) -> None:
        self._address = address
        self._size = size
        self._first = 0  # what the counter holds when a work begins

    def blocks(self, count: int) -> Iterator[int]:
        """Numbers out of 0 to `count - 1` that are this member's, as long as there are any; every member gives the same count.

        To be gone through to its end, and by all members before one begins the next work.
        """
        while (number := fetch_add(self._address, 1) - self._first & MASK) < count:
            yield number
        self._first = self._first + count + self._size & MASK
