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

from braid.programs.schedule.bars import COLOUR_OF, WAIT, Bar, draw
from braid.programs.schedule.program import LOCAL, SEND, Action, Program
from braid.programs.schedule.simulate import Interval, Timeline
from braid.runtime.text import seconds_text
from braid.runtime.trace_format import Event, complete

__all__ = ["lanes", "table", "to_svg", "to_trace"]

MOST_COLUMNS = 64  # columns of a table; more are not readable


def table(program: Program) -> list[list[str]]:
    """Return a program's actions as a table, with a column per round or micro-batch.

    Returns:
        Rows of cells: a header row, then a row per rank.
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
    """Draw a timeline as text, one line of `width` characters per rank.

    Work is drawn with its kind and index, and a message in flight with a dash and its index.

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


def to_svg(
    timeline: Timeline,
    num_ranks: int,
    *,
    caption: str = "",
    notes: Sequence[str] = (),
) -> str:
    """Draw a timeline as SVG; each bar shows a description while the mouse is over it.

    Args:
        timeline: Timeline of a simulation.
        num_ranks: World size.
        caption: Text below the picture, such as the bubble of a pipeline.
        notes: Text at the right of each rank's line, such as its peak activations.
    """
    kinds = {interval.action.kind for interval in timeline.intervals}
    colours = {kind: COLOUR_OF.get(kind.partition("_")[0], WAIT) for kind in sorted(kinds)}
    bars = [
        Bar(i.rank, i.start_s, i.end_s, colours[i.action.kind], _describe(i), part=_part(i))
        for i in timeline.intervals
    ]
    names = [f"rank {rank}" for rank in range(num_ranks)]
    return draw(
        names,
        bars,
        timeline.seconds,
        legend=colours,
        caption=caption,
        notes=notes,
    )


def _part(interval: Interval) -> str:
    """Return the part of a lane: sends are in the upper half, receives in the lower one."""
    if not interval.is_message:
        return "whole"
    return "upper" if interval.action.kind.startswith("send") else "lower"


def to_trace(timeline: Timeline) -> list[Event]:
    """Convert a timeline to trace events for trace viewers, with a process per rank."""
    return [
        complete(
            f"{i.action.kind} {i.action.unit}.{i.action.index}",
            i.rank,
            i.action.kind,
            i.start_s * 1e6,
            (i.end_s - i.start_s) * 1e6,
            cat="simulated",
        )
        for i in timeline.intervals
    ]


def _describe(interval: Interval) -> str:
    action = interval.action
    peer = f", rank {action.peer}" if action.peer >= 0 else ""
    more = f" and {interval.num_actions - 1} more" if interval.num_actions > 1 else ""
    return (
        f"{action.kind} {action.unit}, {action.index}{peer}{more}: "
        f"{seconds_text(interval.start_s)} to {seconds_text(interval.end_s)}"
    )
