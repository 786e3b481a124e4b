"""Pictures of programs and timelines: text for a terminal, SVG for a page, events for Perfetto.

round          0          1          2          3
rank 0    0>1 +2<2   2>1 +1<2   1>1  0<2   0>1  2<2      block > to, block < from, + added
rank 1    1>2 +0<0   0>2 +2<0   2>2  1<0   1>2  0<0

rank 0   F0 F1 F2       B0   F3    B1     B2   B3        a timeline: each character is a
                                                         share of the whole time
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

from braid.schedule.program import LOCAL, SEND, Action, Program
from braid.schedule.simulate import Interval, Timeline

__all__ = ["lanes", "table", "time_text", "to_svg", "to_trace"]

KILO = 1000
MOST_COLUMNS = 64  # columns of a table; nobody reads more
# Paul Tol's bright scheme, which colour-blind people can read, too.
COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#bbbbbb",
)
LANE, BAR, LEFT, TOP, LEGEND = 26, 18, 70, 24, 90  # pixels


def table(program: Program) -> list[list[str]]:
    """Return the actions of every rank as a table, by round or micro-batch.

    Returns:
        Rows of cells: the head first, then a row per rank.
    """
    last = max((a.index for actions in program.ranks for a in actions), default=-1)
    columns = range(min(last + 1, MOST_COLUMNS))
    shorten = _merged if program.vocabulary.posts == "round" else list
    cut = ["..."] if last >= MOST_COLUMNS else []
    rows = [[program.vocabulary.index_name, *map(str, columns), *cut]]
    for rank, actions in enumerate(program.ranks):
        cells: dict[int, list[str]] = defaultdict(list)
        for action in actions:
            cells[action.index].append(_cell(program, action))
        texts = [" ".join(shorten(cells[i])) for i in columns]
        rows.append([f"rank {rank}", *texts, *cut])
    return rows


def _cell(program: Program, action: Action) -> str:
    role = program.vocabulary.role(action)
    if role == LOCAL:
        return f"{action.unit}={action.edge}" if action.edge >= 0 else action.kind
    mark = ">" if role == SEND else "<"
    adds = "+" if action.kind == "reduce" else ""
    return f"{adds}{action.unit}{mark}{action.peer}"


def _merged(cells: Sequence[str]) -> list[str]:
    """Return cells in order; for five or more, the number of each kind."""
    if len(cells) <= 4:
        return list(cells)
    ways = Counter(
        "=" if "=" in cell else (cell[0] == "+", cell.lstrip("+0123456789")) for cell in cells
    )
    texts = []
    for way, count in ways.items():
        adds, peer = way if isinstance(way, tuple) else (False, way)
        texts.append(f"{count} copies" if peer == "=" else f"{'+' if adds else ''}{count}x{peer}")
    return texts


def lanes(timeline: Timeline, num_ranks: int, width: int = 100) -> list[str]:
    """Draw a line of `width` characters per rank.

    Work shows its kind and index; a message under way shows a dash and its index.

    Args:
        timeline: Timeline of a simulation.
        num_ranks: World size.
        width: Characters for the whole time.
    """
    total = timeline.seconds or 1.0
    rows = [[" "] * width for _ in range(num_ranks)]
    # Work is drawn over messages.
    ordered = sorted(timeline.intervals, key=lambda i: not i.is_message)
    for interval in ordered:
        if interval.is_message and interval.end_s == interval.start_s:
            continue
        first = min(int(interval.start_s / total * width), width - 1)
        end = max(first + 1, min(round(interval.end_s / total * width), width))
        text = _label(interval)
        fill = "-" if interval.is_message else "="
        rows[interval.rank][first:end] = text[: end - first].ljust(end - first, fill)
    return [f"rank {rank:<4} {''.join(row)}" for rank, row in enumerate(rows)]


def _label(interval: Interval) -> str:
    """Return kind and index; of a message a dash and the index, to distinguish it from work."""
    kind = "-" if interval.is_message else interval.action.kind
    return f"{kind}{interval.action.index}"


def to_svg(timeline: Timeline, num_ranks: int, width: int = 1000) -> str:
    """Draw the timeline as SVG; the pointer shows what each bar is.

    Args:
        timeline: Timeline of a simulation.
        num_ranks: World size.
        width: Pixels for the whole time.
    """
    total = timeline.seconds or 1.0
    kinds = sorted({interval.action.kind for interval in timeline.intervals})
    colour = {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(kinds)}
    height = TOP + num_ranks * LANE + LANE
    parts = [
        (
            '<svg xmlns="http://www.w3.org/2000/svg" '
            f'width="{LEFT + max(width, LEGEND * len(kinds)) + 10}" height="{height}" '
            'font-family="sans-serif" font-size="12">'
        )
    ]
    for i, kind in enumerate(kinds):
        parts.append(
            f'<rect x="{LEFT + i * LEGEND}" y="4" width="12" height="12" fill="{colour[kind]}"/>'
        )
        parts.append(f'<text x="{LEFT + i * LEGEND + 16}" y="14">{escape(kind)}</text>')
    names = range(num_ranks)
    parts += (f'<text x="4" y="{TOP + rank * LANE + 14}">rank {rank}</text>' for rank in names)
    for interval in timeline.intervals:
        x = LEFT + interval.start_s / total * width
        wide = max((interval.end_s - interval.start_s) / total * width, 0.5)
        y, high = float(TOP + interval.rank * LANE), float(BAR)
        if interval.is_message:  # sends in the upper half of a lane, receives in the lower
            high = BAR / 2
            y += 0 if interval.action.kind.startswith("send") else high
        what = escape(_describe(interval))
        parts.append(
            f'<rect x="{x:.2f}" y="{y:g}" width="{wide:.2f}" height="{high:g}" '
            f'fill="{colour[interval.action.kind]}" '
            f'stroke="white" stroke-width="0.5"><title>{what}</title></rect>'
        )
    parts.append(f'<text x="{LEFT}" y="{height - 8}">0</text>')
    parts.append(
        f'<text x="{LEFT + width}" y="{height - 8}" text-anchor="end">{time_text(total)}</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def to_trace(timeline: Timeline) -> list[dict[str, Any]]:
    """Return events of Chrome's trace format, in microseconds; a process per rank."""
    return [
        {
            "name": f"{i.action.kind} {i.action.unit}.{i.action.index}",
            "cat": "simulated",
            "ph": "X",
            "pid": i.rank,
            "tid": i.action.kind,
            "ts": i.start_s * 1e6,
            "dur": (i.end_s - i.start_s) * 1e6,
        }
        for i in timeline.intervals
    ]


def _describe(interval: Interval) -> str:
    action = interval.action
    peer = f", rank {action.peer}" if action.peer >= 0 else ""
    more = f" and {interval.num_actions - 1} more" if interval.num_actions > 1 else ""
    return (
        f"{action.kind} {action.unit}, {action.index}{peer}{more}: "
        f"{time_text(interval.start_s)} to {time_text(interval.end_s)}"
    )


def time_text(seconds: float) -> str:
    """Format seconds with three digits and a unit: `15.1 us`, `2.3 ms`, `4 s`, `1,200 s`."""
    for unit, scale in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        digits = f"{seconds / scale:.3g}"
        if float(digits) < KILO:
            return f"{digits} {unit}"
    return f"{seconds:,.0f} s"
