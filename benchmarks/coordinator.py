"""Measure a coordinator: null closures against TensorFlow's, and work while workers are killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.workers.local_tasks import (
    BRAID,
    TENSORFLOW,
    figures_under_kills,
    rates_of_null_closures,
)
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums
from braid.runtime.option_types import Interval
from braid.runtime.terminal_table import new_table

__all__ = ["BENCH", "CoordinatorBench", "CoordinatorReport"]

LEAST_RATE = 5000.0  # null closures per second
LEAST_RATIO = 3.0  # of TensorFlow's
LEAST_SHARE = 0.9  # of the undisturbed closures per second, while workers are killed


class CoordinatorReport(Report, kw_only=True):
    """Closures per second.

    Attributes:
        null: Null closures of braid per second, by round.
        tensorflow: Null closures of TensorFlow per second, by round.
        phases: Closures per second of each phase; in every second phase workers are killed.
        wrong: Number of closures that were not counted exactly once.
    """

    null: list[float] = msgspec.field(default_factory=list)
    tensorflow: list[float] = msgspec.field(default_factory=list)
    phases: list[float] = msgspec.field(default_factory=list)
    wrong: int = 0

    @property
    def share(self) -> float:
        """Fraction of the undisturbed rate that remains while workers are killed."""
        return median(self.phases[1::2]) / median(self.phases[::2])


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorBench:
    """Measure a coordinator with one server and two workers, each a process.

    Attributes:
        closures: Number of null closures in a round.
        rounds: Number of rounds.
        phases: Number of phases with closures of 10 ms; in every second phase workers are killed.
        phase_s: Seconds of a phase.
        every_s: Time between two kills, such as 20s.
        tensorflow: Python with tensorflow-cpu, to measure TensorFlow's coordinator.
        out: Directory for `coordinator.json`.
    """

    closures: int = 5000
    rounds: int = 5
    phases: int = 4
    phase_s: float = 20.0
    every_s: Interval = 5.0
    tensorflow: Path | None = None
    out: Path = Path("runs/bench-coordinator")

    def __post_init__(self) -> None:
        check_minimums([("closures", self.closures, 1), ("rounds", self.rounds, 1)])
        check_minimums([("phases", self.phases, 2)])


def _measure(bench: CoordinatorBench, console: Console) -> CoordinatorReport:
    report = CoordinatorReport()
    with console.status("null closures"):
        report.null = rates_of_null_closures(BRAID, bench.closures, bench.rounds)
    if bench.tensorflow is not None:
        with console.status("null closures of TensorFlow"):
            python = str(bench.tensorflow)
            rates = rates_of_null_closures(TENSORFLOW, bench.closures, bench.rounds, python)
            report.tensorflow = rates
    with console.status("closures while workers are killed"):
        report.phases, report.wrong = figures_under_kills(
            bench.phases, bench.phase_s, bench.every_s
        )
    return report


def _table(report: CoordinatorReport) -> Table:
    grid = new_table(report.place, ("closures per second",), ("median", "least", "most"))
    rows = {
        "null closures": report.null,
        "null closures of TensorFlow": report.tensorflow,
        "closures of 10 ms": report.phases[::2],
        "the same, workers killed": report.phases[1::2],
    }
    for name, rates in rows.items():
        if rates:
            grid.add_row(name, *(f"{f(rates):,.0f}" for f in (median, min, max)))
    return grid


def _verdicts(report: CoordinatorReport) -> Iterator[BenchVerdict]:
    rate = median(report.null)
    claim = f"at least {LEAST_RATE:,.0f} null closures per second with 2 workers"
    yield BenchVerdict(claim, f"measured {rate:,.0f}", rate >= LEAST_RATE)
    if report.tensorflow:
        ratio = rate / median(report.tensorflow)
        claim = f"at least {LEAST_RATIO:g} times TensorFlow's null closures per second"
        yield BenchVerdict(claim, f"measured {ratio:.1f}", ratio >= LEAST_RATIO)
    claim = f"at least {LEAST_SHARE:.0%} of the undisturbed rate while workers are killed"
    yield BenchVerdict(claim, f"measured {report.share:.0%}", report.share >= LEAST_SHARE)
    claim = "each closure's update is counted once"
    yield BenchVerdict(claim, f"{report.wrong} are not", report.wrong == 0)


BENCH = Benchmark("coordinator", CoordinatorBench, _measure, _table, _verdicts)
