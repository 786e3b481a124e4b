"""The times of buckets as a picture: a lane for each rank, and the critical bucket marked.

rank 0   |  0  |   1   |.............:         a bar ends when the bucket is full on this rank;
rank 1   |   0   |         1         |         dots: it waits for the last rank's critical bucket
         0                      41 ms
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from braid.schedule.plot import COLOURS, time_text

__all__ = ["bucket_picture"]

WIDTH, LANE, BAR, LEFT, TOP = 900, 30, 20, 70, 34  # pixels
MIN_LABEL = 16  # pixels that a number needs
MARKED = "#aa0000"
NUM_TICKS = 4


def bucket_picture(
    step: int,
    ranks: Sequence[int],
    labels: Sequence[str],
    ready_s: Sequence[Sequence[float]],
    critical: int | None,
) -> str:
    """SVG, which says more under the pointer.

    Args:
        step: Number of the reduction.
        ranks: Global ranks.
        labels: By bucket, what is in it.
        ready_s: By bucket, then by rank; 0 for buckets that have not left.
        critical: The bucket that is marked; None for none.
    """
    total = max((seconds for row in ready_s for seconds in row), default=0.0) or 1.0
    pixels = WIDTH / total
    height = TOP + len(ranks) * LANE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 40}" height="{height + 26}" font-family="sans-serif" font-size="12">',
        f'<text x="4" y="16">{escape(_title(step, ranks, labels, ready_s, critical))}</text>',
    ]
    for tick in range(NUM_TICKS + 1):
        x = LEFT + tick * WIDTH / NUM_TICKS
        parts.append(f'<path d="M{x:g} {TOP - 4}V{height}" stroke="#dddddd"/>')
        at = time_text(total * tick / NUM_TICKS) if tick else "0"
        parts.append(f'<text x="{x:g}" y="{height + 16}" text-anchor="middle">{at}</text>')
    for lane, rank in enumerate(ranks):
        y = TOP + lane * LANE
        parts.append(f'<text x="4" y="{y + 15}">rank {rank}</text>')
        before = 0.0
        own = [(row[lane], number) for number, row in enumerate(ready_s) if row[lane] > 0]
        for ready, number in sorted(own):
            marked = number == critical
            x, wide = LEFT + before * pixels, (ready - before) * pixels
            edge = f'stroke="{MARKED}" stroke-width="3"' if marked else 'stroke="white"'
            what = escape(
                f"rank {rank}, bucket {number}: full after {time_text(ready)}; {labels[number]}"
            )
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(wide, 0.5):.2f}" height="{BAR}" '
                f'fill="{COLOURS[number % len(COLOURS)]}" {edge}><title>{what}</title></rect>'
            )
            if wide >= MIN_LABEL:
                parts.append(
                    f'<text x="{x + wide / 2:.2f}" y="{y + 15}" text-anchor="middle" fill="white">{number}</text>'
                )
            before = ready
            if marked and (last := max(ready_s[number])) > ready:
                parts.append(
                    f'<path d="M{LEFT + ready * pixels:.2f} {y + BAR / 2:g}H{LEFT + last * pixels:.2f}" stroke="{MARKED}" '
                    f'stroke-width="2" stroke-dasharray="2 3"><title>rank {rank} waits {time_text(last - ready)}</title></path>'
                )
    return "\n".join([*parts, "</svg>"]) + "\n"


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
        f"rank {ranks[row.index(max(row))]} was behind by {time_text(late_s)}"
    )
