"""Measure what a message costs on each path of braid, and which part of the path takes the time.

Paths: send and recv of a group and of torch.distributed over braid, an edge between two pipeline
stages, a remote call, and a push to a parameter server until it is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.workers.messages import BYTES, PARTS, PATHS, Plan, Row, calls, exchange, pushes
from braid.cli.bench.harness.ranks import figures_of
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums, unknown
from braid.runtime.terminal_table import add_group, new_table

__all__ = ["BENCH", "MessageBench", "MessageReport", "message_verdicts"]

LABELS = {
    "group": "send and recv, there and back",
    "torch": "send and recv by torch.distributed over braid, there and back",
    "edge": "between pipeline stages, there and back",
    "call": "remote call, there and back",
    "push": "push, until it is accepted",
}
WORKERS = ((exchange, 2, {"group", "torch", "edge"}), (calls, 2, {"call"}), (pushes, 3, {"push"}))
COLUMNS = (*PARTS, "other")
TARGETS_US = {
    ("group", "1 KiB"): 15.0,
    ("torch", "1 KiB"): 22.0,
    ("torch", "16 MiB"): 2200.0,
    ("push", "1 KiB"): 100.0,
}


class MessageReport(Report, kw_only=True):
    """Figures of all paths and sizes.

    Attributes:
        rows: One for each path and size.
    """

    rows: list[Row] = msgspec.field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageBench:
    """Measure the time of messages on each path of braid, and its parts.

    Attributes:
        paths: Names out of `PATHS`.
        sizes: Names out of `BYTES`.
        rounds: Number of rounds; times are medians over them.
        out: Directory for `messages.json` and the logs of the runs.
    """

    paths: tuple[str, ...] = PATHS
    sizes: tuple[str, ...] = tuple(BYTES)
    rounds: int = 5
    out: Path = Path("runs/bench-messages")

    def __post_init__(self) -> None:
        problems = [*unknown("path", self.paths, PATHS), *unknown("size", self.sizes, BYTES)]
        check_minimums([("rounds", self.rounds, 1)], problems)


def _measure(bench: MessageBench, console: Console) -> MessageReport:
    report = MessageReport()
    plan = Plan(paths=bench.paths, sizes=bench.sizes, rounds=bench.rounds)
    for worker, num_ranks, paths in WORKERS:
        if paths & set(bench.paths):
            with console.status(", ".join(sorted(paths & set(bench.paths)))):
                report.rows += figures_of(num_ranks, worker, plan, list[Row], out=bench.out)
    return report


def _table(report: MessageReport) -> Table:
    title = f"{report.place}; parts: % of the time in the measuring thread, with a profiler"
    grid = new_table(title, ("message", "bytes"), ("us", *COLUMNS, "calls", "system"))
    for path in dict.fromkeys(row.path for row in report.rows):
        rows = [row for row in report.rows if row.path == path]
        add_group(grid, LABELS[path], (_cells(row) for row in rows))
    return grid


def _cells(row: Row) -> tuple[str, ...]:
    shares = (f"{row.shares.get(part, 0):.0%}".rstrip("%") for part in COLUMNS)
    calls = (f"{row.calls:.0f}", f"{sum(row.system_calls.values()):.0f}")
    return row.size, f"{row.seconds * 1e6:,.0f}", *shares, *calls


def message_verdicts(report: MessageReport) -> Iterator[BenchVerdict]:
    """Yield the verdicts on the targets for messages."""
    for row in report.rows:
        most_us = TARGETS_US.get((row.path, row.size))
        if most_us is not None:
            claim = f"{LABELS[row.path]}, {row.size}: at most {most_us:,.0f} us"
            us = row.seconds * 1e6
            yield BenchVerdict(claim, f"measured {us:,.0f}", us <= most_us)


BENCH = Benchmark("messages", MessageBench, _measure, _table, message_verdicts, width=176)
