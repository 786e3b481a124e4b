"""Computes the geometry of the figures: positions in percent, without any markup.

Text inside a scaled SVG shrinks with the window until it is illegible. A figure is therefore a
drawing without text that stretches to the available width (`preserveAspectRatio="none"`, strokes
that do not scale). Its labels are ordinary text at positions in percent. The page's template draws
the results of these functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from braid.launch.observe.intervals import EventInterval, lanes
from braid.launch.observe.timeline import RankTimeline
from braid.runtime.text import bytes_text, count_text, duration_text

__all__ = [
    "Box",
    "Chart",
    "Lane",
    "Picture",
    "boxes_of",
    "line_chart",
    "picture",
    "ticks",
    "time_ticks",
]

MAX_POINTS = 400
MAX_FLIGHTS = 4  # number of rows of buckets and collectives under way, per rank
MIN_LABEL = 6.0  # width in percent below which a box has no room for text
MIN_WIDTH = 0.12  # width in percent below which a box is invisible


class AxisTick(NamedTuple):
    """A labelled position on an axis."""

    at: float
    label: str


class ChartLine(NamedTuple):
    """One curve of a chart.

    Attributes:
        name: Name of the curve.
        role: CSS class, which determines the colour.
        pieces: SVG points of the connected pieces; the curve is broken at missing values.
        dots: Points without neighbours.
        last: Text of the last value.
    """

    name: str
    role: str
    pieces: tuple[str, ...]
    dots: tuple[tuple[float, float], ...]
    last: str


class Chart(NamedTuple):
    """Curves over steps; y points downwards, as in SVG."""

    lines: tuple[ChartLine, ...]
    x_ticks: tuple[AxisTick, ...]
    y_ticks: tuple[AxisTick, ...]
    y_label: str
    note: str


class Box(NamedTuple):
    """A rectangle in a lane, with its title and label."""

    x: float
    width: float
    role: str
    title: str
    label: str
    open: bool


class Lane(NamedTuple):
    """One rank in a picture: rows for its phases, its states, and operations under way."""

    rank: int
    phases: tuple[Box, ...]
    states: tuple[Box, ...]
    flights: tuple[tuple[Box, ...], ...]


class Picture(NamedTuple):
    """Drawing of the timeline of all ranks between two moments."""

    title: str
    lanes: tuple[Lane, ...]
    x_ticks: tuple[AxisTick, ...]


def line_chart(
    rows: Sequence[Mapping[str, float]],
    series: Mapping[str, tuple[str, str]],
    *,
    y_label: str,
    scale: float = 1.0,
    from_zero: bool = False,
) -> Chart | None:
    """Return a chart of some numbers over steps.

    Args:
        rows: Numbers of each step, by key.
        series: Name and role (colour) of the curve for each key.
        y_label: Label of the y axis, with the unit.
        scale: Factor for all values.
        from_zero: Whether the y axis begins at 0.

    Returns:
        The chart; None if no row has a finite value of any key.
    """
    points = {
        key: [(row["step"], row[key] * scale) for row in rows if key in row] for key in series
    }
    finite = {key: [(x, y) for x, y in curve if math.isfinite(y)] for key, curve in points.items()}
    known = [point for curve in finite.values() for point in curve]
    if not known:
        return None
    x_low, x_high = min(x for x, _ in known), max(x for x, _ in known)
    y_marks = ticks(0.0 if from_zero else min(y for _, y in known), max(y for _, y in known))
    y_low, y_high = y_marks[0], y_marks[-1]
    x_span = (x_high - x_low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        x_percent = 100 * (x - x_low) / x_span if x_high > x_low else 50.0
        return round(x_percent, 2), round(100 * (1 - (y - y_low) / (y_high - y_low)), 2)

    drawn, per_point = [], 1
    for key, (name, role) in series.items():
        if finite[key]:
            thinned, count = _thin(points[key])
            per_point = max(per_point, count)
            last_x, last_y = finite[key][-1]
            last = f"{count_text(last_y)} at step {last_x:.0f}"
            drawn.append(_line(name, role, [(*place(x, y), y) for x, y in thinned], last))
    num_missing = sum(len(points[key]) - len(finite[key]) for key in series)
    notes = [f"each point is the mean of {per_point} steps"] if per_point > 1 else []
    notes += [f"{num_missing} values are not finite and not drawn"] if num_missing else []
    return Chart(
        tuple(drawn),
        tuple(
            AxisTick(place(x, y_low)[0], count_text(x))
            for x in ticks(x_low, x_high, whole=True)
            if x_low <= x <= x_high
        ),
        tuple(AxisTick(place(x_low, y)[1], count_text(y)) for y in y_marks),
        y_label,
        "; ".join(notes),
    )


def picture(
    timelines: Sequence[RankTimeline], start_ns: int, end_ns: int, *, title: str
) -> Picture:
    """Return a picture of all ranks between two moments."""
    span = max(1, end_ns - start_ns)
    return Picture(
        title,
        tuple(_lane(timeline, start_ns, start_ns + span) for timeline in timelines),
        time_ticks(span),
    )


def time_ticks(span_ns: int) -> tuple[AxisTick, ...]:
    """Return the labels of a time axis."""
    return tuple(
        AxisTick(round(100 * mark * 1e6 / span_ns, 2), duration_text(mark * 1e6) if mark else "0")
        for mark in ticks(0.0, span_ns / 1e6, count=5)
        if mark * 1e6 <= span_ns
    )


def boxes_of(
    spans: Iterable[tuple[float, float, str, str, str]],
    start_ns: float,
    span_ns: float,
    *,
    least_label: float = MIN_LABEL,
) -> tuple[Box, ...]:
    """Return boxes for spans.

    Args:
        spans: Begin, end, role, title and label of each box.
        start_ns: Left edge of the picture.
        span_ns: Width of the picture.
        least_label: Width in percent below which a box has no label.
    """
    boxes = []
    for begin, end, role, title, label in spans:
        begin_percent, width = 100 * (begin - start_ns) / span_ns, 100 * (end - begin) / span_ns
        text = label if width >= least_label else ""
        box = Box(
            round(begin_percent, 3), round(max(MIN_WIDTH, width), 3), role, title, text, open=False
        )
        boxes.append(box)
    return tuple(boxes)


def ticks(low: float, high: float, *, count: int = 5, whole: bool = False) -> list[float]:
    """Return at least two round numbers that enclose [low, high] in about `count` steps."""
    if high <= low:
        margin = max(abs(low) * 0.1, 1.0 if whole else 1e-9)
        low, high = (0.0, high) if low > 0 and not whole else (low - margin, high + margin)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def _line(
    name: str, role: str, points: Iterable[tuple[float, float, float]], last: str
) -> ChartLine:
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, top, value in points:
        if math.isfinite(value):
            pieces[-1].append((x, top))
        elif pieces[-1]:
            pieces.append([])
    curves = [piece for piece in pieces if len(piece) > 1]
    dots = [piece[0] for piece in pieces if len(piece) == 1]
    texts = (" ".join(f"{x:g},{top:g}" for x, top in piece) for piece in curves)
    return ChartLine(name, role, tuple(texts), tuple(dots), last)


def _thin(points: Sequence[tuple[float, float]]) -> tuple[list[tuple[float, float]], int]:
    """Replace groups of neighbouring points by their means, to limit the size of the page."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return list(points), 1
    groups = [points[index : index + size] for index in range(0, len(points), size)]
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups], size


def _lane(timeline: RankTimeline, start_ns: int, end_ns: int) -> Lane:
    span = end_ns - start_ns

    def box(
        begin: int, end: int, role: str, title: str, label: str = "", *, open_: bool = False
    ) -> Box:
        from_ns, to_ns = max(begin, start_ns) - start_ns, min(end, end_ns) - start_ns
        width = max(MIN_WIDTH, 100 * (to_ns - from_ns) / span)
        text = label if width >= MIN_LABEL else ""
        return Box(round(100 * from_ns / span, 3), round(width, 3), role, title, text, open_)

    def boxes(intervals: Iterable[EventInterval]) -> tuple[Box, ...]:
        return tuple(
            box(i.start_ns, i.end_ns, i.role, _title(i), i.name.partition("(")[0], open_=i.open)
            for i in intervals
        )

    shown = [
        i
        for i in timeline.intervals
        if i.start_ns < end_ns and i.end_ns > start_ns and i.role != "instant"
    ]
    phases = lanes((i for i in shown if i.role == "phase"), nest=False)
    steps = [i for i in shown if i.role == "step"]
    recorded = steps or [EventInterval(*timeline.span_ns, "recording", "step")]
    states = [
        box(a, b, "compute", f"{'compute' if steps else 'not in a collective'} in {i.name} {i.seq}")
        for i in recorded
        if i.start_ns < end_ns and i.end_ns > start_ns
        for a, b in [(max(i.start_ns, start_ns), min(i.end_ns, end_ns))]
    ]
    for role, cover in (("transfer", timeline.transfers), ("wait", timeline.waits)):
        states += [
            box(a, b, role, f"{role}, {duration_text(b - a)}")
            for a, b in cover.clipped(start_ns, end_ns)
        ]
    buckets = [i for i in shown if i.role == "bucket"]
    flying = buckets or [i for i in shown if i.role == "collective"]
    flights = lanes(flying, nest=False)[:MAX_FLIGHTS]
    return Lane(
        timeline.rank,
        boxes(phases[0] if phases else ()),
        tuple(states),
        tuple(boxes(flight) for flight in flights),
    )


def _title(interval: EventInterval) -> str:
    lasted = "did not end" if interval.open else duration_text(interval.dur_ns)
    parts = [interval.name, lasted]
    if interval.nbytes:
        parts.append(bytes_text(interval.nbytes))
    if interval.site:
        parts.append(f"called at {interval.site}")
    return ", ".join(parts)
