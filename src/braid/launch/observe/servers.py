"""Sums up the servers of a parameter server: staleness of pushes, pulls that waited, late pushes.

Servers record `push` with its staleness as the number (records between the worker's pull and its
push), `parked pull` for a pull that waited, and `late push` for one that was dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from braid.launch.observe.operations import percentile
from braid.launch.observe.timeline import RankTimeline
from braid.runtime.text import duration_text, percent_text

__all__ = ["ServerRow", "servers", "servers_text"]

PUSH, PARKED, LATE = "push", "parked pull", "late push"
MAX_BARS = 12  # values of staleness that a table shows; larger ones are added up


class ServerRow(NamedTuple):
    """Numbers of one parameter server, for the report.

    Attributes:
        rank: Rank of the server.
        staleness: Number of pushes by staleness.
        parked: Number of pulls that waited.
        parked_ns: Time that they waited in all.
        p50_ns: Median of these waits.
        p95_ns: Wait that one in twenty exceeds.
        late: Number of pushes that were dropped because they came too late.
    """

    rank: int
    staleness: dict[int, int]
    parked: int
    parked_ns: int
    p50_ns: int
    p95_ns: int
    late: int

    @property
    def pushes(self) -> int:
        """Number of pushes."""
        return sum(self.staleness.values())

    @property
    def bars(self) -> list[tuple[str, float]]:
        """Shares of pushes by staleness."""
        total = max(self.pushes, 1)
        shown = [(str(lag), n / total) for lag, n in self.staleness.items() if lag < MAX_BARS]
        rest = sum(n for lag, n in self.staleness.items() if lag >= MAX_BARS)
        return [*shown, (f"{MAX_BARS} or more", rest / total)] if rest else shown


def servers(timelines: Iterable[RankTimeline]) -> tuple[ServerRow, ...]:
    """Return a row for each rank that has served pushes or pulls."""
    rows = []
    for timeline in timelines:
        by_name: dict[str, list[tuple[int, int]]] = {PUSH: [], PARKED: [], LATE: []}
        for interval in timeline.intervals:
            if interval.name in by_name:
                by_name[interval.name].append((interval.seq, interval.end_ns - interval.start_ns))
        if not any(by_name.values()):
            continue
        waits = [duration for _, duration in by_name[PARKED]]
        rows.append(
            ServerRow(
                rank=timeline.rank,
                staleness=dict(sorted(Counter(seq for seq, _ in by_name[PUSH]).items())),
                parked=len(waits),
                parked_ns=sum(waits),
                p50_ns=percentile(waits, 0.5),
                p95_ns=percentile(waits, 0.95),
                late=len(by_name[LATE]),
            )
        )
    return tuple(rows)


def servers_text(rows: Iterable[ServerRow]) -> list[str]:
    """Return a line of text on each parameter server, for the terminal."""
    lines = []
    for row in rows:
        lags = ", ".join(f"{name}: {percent_text(share)}" for name, share in row.bars)
        line = f"rank {row.rank} served {row.pushes:,} pushes (staleness {lags or 'none'})"
        if row.parked:
            line += (
                f"; {row.parked:,} pulls waited {duration_text(row.parked_ns)} in all, half of "
                f"them less than {duration_text(row.p50_ns)}"
            )
        lines.append(line + (f"; {row.late:,} late pushes were dropped" if row.late else ""))
    return lines
