"""Measure a parameter server against references in the same run.

Four jobs run in sequence: transfers between one server and one worker, training steps, servers that
are killed, and stragglers (`workers.ps_transfer`, `ps_training`, `ps_failover`, `ps_stragglers`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import tyro
from rich.console import Console as RichConsole
from rich.table import Table

from benchmarks.ps_targets import (
    PS_LITE_PAIRS,
    failover_verdicts,
    kept,
    row_verdicts,
    straggler_verdicts,
)
from benchmarks.workers.ps import main
from benchmarks.workers.ps_plan import PARTS, Failover, Measured, Plan, Ratio
from benchmarks.workers.ps_stragglers import NUM_WORKERS
from benchmarks.workers.ps_training import ALL_REDUCE
from benchmarks.workers.ps_transfer import RPC
from braid.cli.bench.harness.ranks import figures_of
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums, unknown
from braid.runtime.terminal_table import add_group, new_table

__all__ = ["BENCH", "PsBench", "PsReport", "ps_table", "ps_verdicts"]

T = TypeVar("T")
TRANSFERS = ("dense", "small", "pairs", "rows")
RANKS = {"step": 4, "failover": 1, "stragglers": 2 + NUM_WORKERS}
TRANSFER_RANKS = 3
ROUNDS = {"stragglers": 2}  # largest number, since each takes ten seconds
LABELS = {
    "dense": "push and pull of a dense table",
    "small": "push of 16 numbers, until accepted",
    "push": "push of pairs",
    "pull": "pull of pairs",
    "rows": "rows pulled and pushed, dim 32",
    "step": "training step, 2 workers",
}
UNITS = {"dense": ("GB/s", 1e9), "push": ("M pairs/s", 1e6), "pull": ("M pairs/s", 1e6)}
UNITS["rows"] = ("M rows/s", 1e6)


class PsReport(Report, kw_only=True):
    """Figures of all parts that were measured.

    Attributes:
        rows: Transfers and training steps.
        failover: Servers that were killed.
        stragglers: Clocks per second by regime.
    """

    rows: list[Measured] = msgspec.field(default_factory=list)
    failover: Failover | None = None
    stragglers: Ratio | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PsBench:
    """Measure a parameter server: bytes, messages, rows, steps, killed servers, stragglers.

    The references are a plain unix socket, torch's RPC, and the step with all-reduce.

    Attributes:
        only: Names of the parts to measure, out of `PARTS`.
        rounds: Number of rounds; every candidate is measured in each of them.
        kills: Number of servers to kill.
        sizes: Sizes of the measurements; its parts, rounds and kills are replaced.
        out: Directory for `ps.json` and the logs of the runs.
    """

    only: tuple[str, ...] = PARTS
    rounds: int = 8
    kills: int = 5
    sizes: Annotated[Plan, tyro.conf.Suppress] = field(default_factory=Plan)
    out: Path = Path("runs/bench-ps")

    def __post_init__(self) -> None:
        least = [("rounds", self.rounds, 1), ("kills", self.kills, 1)]
        check_minimums(least, unknown("part", self.only, PARTS))


def _measure_ps(bench: PsBench, console: RichConsole) -> PsReport:
    report = PsReport()

    def measure(parts: tuple[str, ...], kind: type[T]) -> T:
        rounds = min(bench.rounds, ROUNDS.get(parts[0], bench.rounds))
        plan = msgspec.structs.replace(bench.sizes, parts=parts, rounds=rounds, kills=bench.kills)
        ranks = RANKS.get(parts[0], TRANSFER_RANKS)
        with console.status(f"measuring {', '.join(parts)}"):
            return figures_of(ranks, main, plan, kind, out=bench.out, run=f"run-{parts[0]}")

    if transfers := tuple(part for part in TRANSFERS if part in bench.only):
        report.rows += measure(transfers, list[Measured])
    if "step" in bench.only:
        report.rows += measure(("step",), list[Measured])
    if "failover" in bench.only:
        report.failover = measure(("failover",), Failover)
    if "stragglers" in bench.only:
        report.stragglers = measure(("stragglers",), Ratio)
    return report


def ps_table(report: PsReport) -> Table:
    """Make a table with one row per act and candidate."""
    title = f"{report.place}; medians of rounds, x = time of the reference / this one's"
    grid = new_table(title, ("measured", "by"), ("ms", "rate", "x"))
    for row in report.rows:
        add_group(grid, LABELS[row.name], _cells(row))
    if (failover := report.failover) is not None:
        times = {"slowest": failover.slowest_s, "repair": failover.repaired_s}
        medians_ms = {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()}
        cells = [(f"{name}, median", f"{ms:.0f}") for name, ms in medians_ms.items()]
        add_group(grid, "servers killed, 3 of them", cells)
    if (stragglers := report.stragglers) is not None:
        rates = {name: statistics.median(rates) for name, rates in stragglers.rates.items()}
        regimes = (
            (name, "", f"{rate:.1f} clocks/s", f"{kept(stragglers, name):.2f}")
            for name, rate in rates.items()
        )
        add_group(grid, "stragglers, 4 workers", regimes)
    return grid


def _cells(row: Measured) -> Iterator[tuple[str, ...]]:
    """Yield each candidate with its time, its rate, and its speed relative to the reference."""
    reference = next((way for way in (RPC, ALL_REDUCE) if way in row.seconds), "")
    for way in row.seconds:
        seconds, (unit, scale) = row.median_s(way), UNITS.get(row.name, ("", 1.0))
        rate = f"{row.amount / seconds / scale:.2f} {unit}" if unit else ""
        ratio = f"{row.ratio(reference, way):.2f}" if reference else ""
        if row.name in PS_LITE_PAIRS:
            ratio = f"{row.amount / seconds / PS_LITE_PAIRS[row.name]:.2f}"
        yield way, f"{seconds * 1e3:.3f}", rate, ratio


def ps_verdicts(report: PsReport) -> list[BenchVerdict]:
    """Return the verdicts on the targets for the parameter server."""
    verdicts = [verdict for row in report.rows for verdict in row_verdicts(row)]
    if report.failover is not None:
        verdicts += failover_verdicts(report.failover)
    if report.stragglers is not None:
        verdicts += straggler_verdicts(report.stragglers)
    return verdicts


def ps_lines(report: PsReport) -> list[object]:
    """Return the verdicts, and notes on the training steps."""
    notes = [
        f"steps: {row.note}; 4 processes of one thread share {report.machine}, and the "
        "all-reduce's ranks have two of them to themselves"
        for row in report.rows
        if row.name == "step"
    ]
    return [*ps_verdicts(report), *notes]


BENCH = Benchmark("ps", PsBench, _measure_ps, ps_table, ps_lines)
