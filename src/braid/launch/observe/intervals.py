"""Sets of moments in time, from which every figure of a report is computed.

"How long did this rank wait in step 31" is the measure of an intersection. With disjoint, sorted
pieces and running sums, an intersection costs two bisections for any number of events. Shares are
computed from unions and differences, so they add up to one, whatever overlaps in the recording.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

__all__ = ["Cover", "EventInterval", "lanes"]


class EventInterval(NamedTuple):
    """One event of a rank, with its names, on the clock of the run.

    Attributes:
        start_ns: Begin, relative to the first event of the run.
        end_ns: End; the end of the run if `open`.
        name: Name, such as `backward` or `all_reduce(float32[1024], sum)`.
        role: `step`, `phase`, `bucket`, `collective`, `call`, `wait` or `instant`.
        channel: Channel of a collective or wait.
        seq: Number of the step, of the bucket, or of the collective on its channel.
        nbytes: Number of bytes moved.
        site: Call site; may be empty.
        open: Whether the event had not ended at the end of the run.
        group: Number of the group, to which the channel belongs; 0 if there is none.
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
        """Duration of the event."""
        return self.end_ns - self.start_ns


class Cover:
    """A set of moments, kept as disjoint intervals.

    Args:
        pieces: Intervals (start, end) in any order; may overlap. Empty intervals are ignored.

    Attributes:
        pieces: Disjoint intervals in ascending order.

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
        """Return the measure of the set inside [start, end)."""
        return max(0, self._up_to(end) - self._up_to(start))

    def clipped(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the pieces of the set inside [start, end)."""
        first = bisect_right(self._ends, start)
        for piece in self.pieces[first : bisect_left(self._starts, end)]:
            yield max(piece[0], start), min(piece[1], end)

    def minus(self, other: Cover) -> Cover:
        """Return the moments of this set that are not in `other`."""
        pieces = []
        for start, end in self.pieces:
            at = start
            for hole_start, hole_end in other.clipped(start, end):
                pieces.append((at, hole_start))
                at = hole_end
            pieces.append((at, end))
        return Cover(pieces)

    def _up_to(self, moment: int) -> int:
        index = bisect_right(self._starts, moment)
        if index == 0:
            return 0
        return (
            self._before[index - 1] + min(moment, self._ends[index - 1]) - self._starts[index - 1]
        )


def lanes(intervals: Iterable[EventInterval], *, nest: bool) -> list[list[EventInterval]]:
    """Distribute intervals over lanes without overlap, with a greedy choice.

    Args:
        intervals: Intervals by begin; of two that begin together, the longer one first.
        nest: Whether an interval may lie inside another one in the same lane.
    """
    filled: list[list[EventInterval]] = []
    stacks: list[list[int]] = []  # ends of the open intervals of each lane
    for interval in intervals:
        for lane, stack in zip(filled, stacks, strict=True):
            while stack and stack[-1] <= interval.start_ns:
                stack.pop()
            if not stack or (nest and interval.end_ns <= stack[-1]):
                lane.append(interval)
                stack.append(interval.end_ns)
                break
        else:
            filled.append([interval])
            stacks.append([interval.end_ns])
    return filled
