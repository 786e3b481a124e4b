"""Sets of moments: the arithmetic that every figure of a report rests on.

"How long did this rank wait in step 31" is the measure of an intersection. Kept as disjoint, sorted
pieces with running sums, it costs two bisections, whatever the number of events; and shares that
are made of unions and differences add up to one by construction, whatever overlaps in the
recording.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

__all__ = ["Cover", "Interval", "lanes"]


class Interval(NamedTuple):
    """One event of a rank, with its texts, on the clock of the run.

    Attributes:
        start_ns: Begin, from the first event of the run.
        end_ns: End; the end of the run when `open`.
        name: Such as `backward` or `all_reduce(float32[1024], sum)`.
        role: step, phase, bucket, collective, wait or instant.
        channel: Channel of a collective or wait.
        seq: Number of the step, of the bucket, or of the collective on its channel.
        nbytes: Bytes moved.
        site: Line of the program that asked for it; may be empty.
        open: It had not ended when the run did.
        group: Number of the group of a collective, since channels are counted in each; 0 when none.
    """

    start_ns: int
    end_ns: int
    name: str
    role: str
    channel: int = 0
    seq: int = 0
    nbytes: int = 0
    site: str = ""
    open: bool = False
    group: int = 0

    @property
    def dur_ns(self) -> int:
        """Duration."""
        return self.end_ns - self.start_ns


class Cover:
    """A set of moments: disjoint pieces in ascending order.

    Args:
        pieces: (start, end) in any order; may overlap, and empty ones do not count.

    >>> Cover([(5, 9), (0, 2), (1, 3)]).pieces
    ((0, 3), (5, 9))
    """

    def __init__(self, pieces: Iterable[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for start, end in sorted(piece for piece in pieces if piece[1] > piece[0]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        self.pieces = tuple(merged)
        self._starts = [start for start, _ in merged]
        self._ends = [end for _, end in merged]
        self._before = [0, *accumulate(end - start for start, end in merged)]

    def within(self, start: int, end: int) -> int:
        """How much of [start, end) it covers."""
        return max(0, self._up_to(end) - self._up_to(start))

    def clipped(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Its pieces inside [start, end)."""
        first = bisect_right(self._ends, start)
        for piece in self.pieces[first : bisect_left(self._starts, end)]:
            yield max(piece[0], start), min(piece[1], end)

    def minus(self, other: Cover) -> Cover:
        """The moments of this set that are not in the other."""
        left = []
        for start, end in self.pieces:
            at = start
            for hole_start, hole_end in other.clipped(start, end):
                left.append((at, hole_start))
                at = hole_end
            left.append((at, end))
        return Cover(left)

    def _up_to(self, moment: int) -> int:
        index = bisect_right(self._starts, moment)
        if index == 0:
            return 0
        return (
            self._before[index - 1] + min(moment, self._ends[index - 1]) - self._starts[index - 1]
        )


def lanes(intervals: Iterable[Interval], *, nest: bool) -> list[list[Interval]]:
    """Spread intervals over as few lanes as a greedy choice needs.

    Args:
        intervals: By begin; of two that begin together, the longer first.
        nest: Whether one may lie inside another in the same lane.
    """
    found: list[list[Interval]] = []
    stacks: list[list[int]] = []  # ends of what is open, per lane
    for interval in intervals:
        for lane, stack in zip(found, stacks, strict=True):
            while stack and stack[-1] <= interval.start_ns:
                stack.pop()
            if not stack or (nest and interval.end_ns <= stack[-1]):
                lane.append(interval)
                stack.append(interval.end_ns)
                break
        else:
            found.append([interval])
            stacks.append([interval.end_ns])
    return found
