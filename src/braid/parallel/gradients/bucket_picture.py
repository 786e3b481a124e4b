"""The times of buckets as a picture: a lane for each rank, and the critical bucket marked.

rank 0   |  0  |   1   |.............:         a bar ends when the bucket is full on this rank;
rank 1   |   0   |         1         |         dots: the critical bucket waits for the last rank
         0                      41 ms
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from braid.programs.schedule.bars import COLOURS, Bar, draw
from braid.runtime.text import seconds_text

__all__ = ["bucket_picture"]

WAITING = "#dddddd"


def bucket_picture(
    step: int,
    ranks: Sequence[int],
    labels: Sequence[str],
    ready_s: Sequence[Sequence[float]],
    critical: int | None,
) -> str:
    """Draw the times of buckets as SVG; the pointer shows what each bar is.

    Args:
        step: Number of the reduction.
        ranks: Global ranks.
        labels: Content of each bucket.
        ready_s: Times by bucket, then by rank; 0 for buckets that were not launched.
        critical: Bucket to mark; None for none.
    """
    names = [f"rank {rank}" for rank in ranks]
    bars = [
        bar
        for lane, name in enumerate(names)
        for bar in _bars(lane, name, labels, ready_s, critical)
    ]
    seconds = max((at for row in ready_s for at in row), default=0.0)
    title = _title(step, ranks, labels, ready_s, critical)
    return draw(names, bars, seconds, title=title)


def _bars(
    lane: int,
    name: str,
    labels: Sequence[str],
    ready_s: Sequence[Sequence[float]],
    critical: int | None,
) -> Iterator[Bar]:
    before = 0.0
    for ready, number in sorted((row[lane], n) for n, row in enumerate(ready_s) if row[lane] > 0):
        title = f"{name}, bucket {number}: full after {seconds_text(ready)}; {labels[number]}"
        colour, marked = COLOURS[number % len(COLOURS)], number == critical
        yield Bar(lane, before, ready, colour, title, str(number), marked=marked)
        before, last = ready, max(ready_s[number])
        if marked and last > ready:
            waits = f"{name} waits {seconds_text(last - ready)}"
            yield Bar(lane, ready, last, WAITING, waits, part="lower")


def _title(
    step: int,
    ranks: Sequence[int],
    labels: Sequence[str],
    ready_s: Sequence[Sequence[float]],
    critical: int | None,
) -> str:
    if critical is None:
        return f"averaging {step}: no bucket"
    row = ready_s[critical]
    late_s = max(row) - min(row)
    return (
        f"averaging {step}: bucket {critical} ({labels[critical]}) is critical, "
        f"rank {ranks[row.index(max(row))]} was behind by {seconds_text(late_s)}"
    )
