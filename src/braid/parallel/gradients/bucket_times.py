"""Times at which buckets were ready on every rank, to find the rank that makes others wait.

Problem: the duration of a step does not show which rank is slow, since an all-reduce ends on all
ranks at the same time. The time *before* it does: when a rank's bucket was full.

Idea: each rank records when a bucket is launched, relative to the end of the last averaging, which
is the same moment on all ranks up to microseconds. One all_gather collects the times.

    bucket   rank 0    rank 1    behind
    0        12.0 ms   12.3 ms   rank 1 by 0.3 ms
    1        25.1 ms   41.0 ms   rank 1 by 15.9 ms   < critical: all wait for it longest

As a chart, it has a lane for each rank:

    rank 0   |  0  |   1   |.............:         a bar ends when the bucket is full on this rank;
    rank 1   |   0   |         1         |         dots: the critical bucket waits for the last rank
             0                      41 ms
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from braid.comm import Group
from braid.parallel.gradients.bucket_layout import BucketLayout
from braid.parallel.gradients.table import ParamRecord
from braid.programs.schedule.bars import COLOURS, Bar, draw
from braid.runtime.text import seconds_text
from braid.types import first_few

__all__ = ["BucketTimes", "ReadyTimes"]

WAITING = "#dddddd"


class BucketRow(NamedTuple):
    """Times of one bucket.

    Attributes:
        names: Names of its parameters.
        ready_s: Seconds since the last averaging ended, by rank.
    """

    names: tuple[str, ...]
    ready_s: tuple[float, ...]

    @property
    def slowest(self) -> int:
        """Position of the rank that was ready last."""
        return max(range(len(self.ready_s)), key=self.ready_s.__getitem__)

    @property
    def late_s(self) -> float:
        """Seconds between the ranks that were ready first and last."""
        return max(self.ready_s) - min(self.ready_s)

    @property
    def label(self) -> str:
        """Text with the names of the bucket's first parameters."""
        return first_few(self.names, 3)


class BucketTimes(NamedTuple):
    """Times of all buckets of one step.

    Attributes:
        step: Number of the averaging.
        ranks: Global ranks, in the order of the columns.
        rows: One row per bucket.
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
        """Combine the times of all ranks into rows, one per bucket.

        Args:
            step: Number of the averaging.
            ranks: Global ranks.
            names: Names of the parameters of each bucket.
            ready_s: Times by rank, then by bucket.
        """
        columns = zip(names, zip(*ready_s, strict=True), strict=True)
        rows = tuple(
            BucketRow(tuple(bucket_names), tuple(times)) for bucket_names, times in columns
        )
        return cls(step, tuple(ranks), rows)

    @property
    def critical(self) -> int:
        """Index of the bucket that was complete on all ranks last."""
        return max(range(len(self.rows)), key=lambda number: max(self.rows[number].ready_s))

    def svg(self) -> str:
        """Draw a lane for each rank and a bar for each bucket, as SVG for a browser."""
        bars = [bar for lane in range(len(self.ranks)) for bar in self._bars(lane)]
        seconds = max((at for row in self.rows for at in row.ready_s), default=0.0)
        title = "no bucket"
        if self.rows:
            row = self.rows[self.critical]
            title = (
                f"bucket {self.critical} ({row.label}) is critical, "
                f"rank {self.ranks[row.slowest]} was behind by {seconds_text(row.late_s)}"
            )
        names = [f"rank {rank}" for rank in self.ranks]
        return draw(names, bars, seconds, title=f"averaging {self.step}: {title}")

    def _bars(self, lane: int) -> Iterator[Bar]:
        """Yield the bars of a rank, with titles that are shown under the pointer."""
        name, before = f"rank {self.ranks[lane]}", 0.0
        for ready, number in sorted((row.ready_s[lane], n) for n, row in enumerate(self.rows)):
            if ready <= 0:  # was not launched
                continue
            row, marked = self.rows[number], number == self.critical
            title = f"{name}, bucket {number}: full after {seconds_text(ready)}; {row.label}"
            colour = COLOURS[number % len(COLOURS)]
            yield Bar(lane, before, ready, colour, title, str(number), marked=marked)
            before, last = ready, max(row.ready_s)
            if marked and last > ready:
                waits = f"{name} waits {seconds_text(last - ready)}"
                yield Bar(lane, ready, last, WAITING, waits, part="lower")

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


class ReadyTimes:
    """Recorder of the times at which this rank's buckets are ready.

    Args:
        now_ns: Clock.
        layouts: Layouts of the buckets before the first averaging.
    """

    def __init__(self, now_ns: Callable[[], int], layouts: tuple[BucketLayout, ...]) -> None:
        self._now_ns = now_ns
        self._began_ns = now_ns()
        self._ready_ns: dict[int, int] = {}
        self._last: tuple[tuple[BucketLayout, ...], dict[int, int]] = layouts, {}

    def bucket_is_ready(self, index: int) -> None:
        """Record that the bucket with this index is ready now."""
        self._ready_ns[index] = self._now_ns() - self._began_ns

    def averaging_ended(self, layouts: tuple[BucketLayout, ...]) -> None:
        """Keep the times of the averaging that has ended, for buckets with these layouts."""
        self._last = layouts, self._ready_ns

    def restart(self) -> None:
        """Restart the clock that bucket times are relative to."""
        self._ready_ns = {}
        self._began_ns = self._now_ns()

    def gather(
        self, group: Group, records: Sequence[ParamRecord], step: int, device: torch.device
    ) -> BucketTimes:
        """Return the times of the last averaging on all ranks; a collective.

        Args:
            group: Ranks that average together.
            records: Parameters by position.
            step: Number of the averaging.
            device: Device on which the group sends small messages.
        """
        layouts, ready_ns = self._last
        seconds = [ready_ns.get(index, 0) * 1e-9 for index in range(len(layouts))]
        table = group.all_gather(torch.tensor([seconds], dtype=torch.float64, device=device))
        names = [[records[p].name for p in layout.members] for layout in layouts]
        rows = table.view(group.size, -1).tolist()
        return BucketTimes.of(step, group.ranks, names, rows)
