"""When buckets were ready, on every rank: who makes the others wait, and with which parameters.

Problem: how long a step takes shows nobody who is slow, since an all-reduce ends on all ranks at the same time. What tells is *before* it:
when a rank had its bucket full.

Idea: each rank notes when a bucket leaves, counted from the end of the last averaging, which is the same moment on all ranks but for microseconds.
One all_gather puts the notes side by side.

    bucket   rank 0    rank 1    behind
    0        12.0 ms   12.3 ms   rank 1 by 0.3 ms
    1        25.1 ms   41.0 ms   rank 1 by 15.9 ms   < critical: all wait for it longest
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from braid.params.bucket_picture import bucket_picture

__all__ = ["BucketRow", "BucketTimes"]

MAX_NAMES = 3


class BucketRow(NamedTuple):
    """One bucket.

    Attributes:
        names: Of its parameters.
        ready_s: By rank, seconds since the last averaging ended.
    """

    names: tuple[str, ...]
    ready_s: tuple[float, ...]

    @property
    def slowest(self) -> int:
        """Position of the rank that was ready last."""
        return max(range(len(self.ready_s)), key=self.ready_s.__getitem__)

    @property
    def late_s(self) -> float:
        """How long the first one waits for the last."""
        return max(self.ready_s) - min(self.ready_s)

    @property
    def label(self) -> str:
        """Names, shortened."""
        more = len(self.names) - MAX_NAMES
        return ", ".join(self.names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


class BucketTimes(NamedTuple):
    """All buckets of one step.

    Attributes:
        step: Number of the reduction.
        ranks: Global ranks, in the order of the columns.
        rows: By bucket.
    """

    step: int
    ranks: tuple[int, ...]
    rows: tuple[BucketRow, ...]

    @classmethod
    def of(
        cls,
        step: int,
        ranks: Sequence[int],
        names: Sequence[Sequence[str]],
        ready_s: Sequence[Sequence[float]],
    ) -> BucketTimes:
        """From what the ranks noted.

        Args:
            step: Number of the reduction.
            ranks: Global ranks.
            names: Of the parameters of each bucket.
            ready_s: By rank, then by bucket.
        """
        columns = zip(names, zip(*ready_s, strict=True), strict=True)
        rows = tuple(BucketRow(tuple(own), tuple(times)) for own, times in columns)
        return cls(step, tuple(ranks), rows)

    @property
    def critical(self) -> int:
        """Number of the bucket that was complete on all ranks last."""
        return max(range(len(self.rows)), key=lambda number: max(self.rows[number].ready_s))

    def svg(self) -> str:
        """A picture: a lane for each rank, a bar for each bucket, and the critical one marked; write it to a file and open that in a browser."""
        return bucket_picture(
            self.step,
            self.ranks,
            [row.label for row in self.rows],
            [row.ready_s for row in self.rows],
            self.critical if self.rows else None,
        )

    def __str__(self) -> str:
        heads = ["bucket", *(f"rank {rank}" for rank in self.ranks), "behind", "parameters"]
        lines = []
        for number, row in enumerate(self.rows):
            times = [f"{seconds * 1e3:.1f} ms" for seconds in row.ready_s]
            behind = f"rank {self.ranks[row.slowest]} by {row.late_s * 1e3:.1f} ms"
            mark = "  < critical: complete last" if number == self.critical else ""
            lines.append([str(number), *times, behind, row.label + mark])
        widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
        shown = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (heads, *lines)
        ]
        return "\n".join([f"buckets of averaging {self.step}, ready after", *shown])
