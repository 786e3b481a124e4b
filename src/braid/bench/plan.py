"""`braid bench plan`: measure what plans promise: so far, that pipelines need not wait."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console as RichConsole
from rich.table import Table

from braid.bench.harness.one_host import figures_of
from braid.bench.harness.report import (
    Report,
    Verdict,
    check_minimums,
    measured_on,
    new_table,
    save,
    show,
    unknown_parts,
)
from braid.bench.workers.plan_plan import PARTS, SYNCHRONOUS, Plan
from braid.bench.workers.ps_plan import Measured
from braid.train.config import MODELS

__all__ = ["PlanBench", "PlanReport", "plan_table", "plan_verdicts", "print_plan", "run_plan"]

LEAST = 1.1  # times as many samples per second as the synchronous pipeline


class PlanReport(Report, kw_only=True):
    """Figures of all parts that were measured.

    Attributes:
        asynchronous: Seconds of each pipeline, by model.
    """

    asynchronous: list[Measured] = msgspec.field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBench:
    """Options of a measurement of plans.

    Attributes:
        only: Names of the parts to measure, out of `PARTS`.
        sizes: Sizes of the measurements; its parts and file are replaced.
        out: Directory for `plan.json` and the log of the run.
    """

    only: tuple[str, ...] = PARTS
    sizes: Plan = field(default_factory=Plan)
    out: Path = Path("runs/bench-plan")

    def __post_init__(self) -> None:
        problems = [
            f"a model is NAME:ROWS, such as mini:4, with a name of {', '.join(MODELS)}: {each}"
            for each in self.sizes.models
            if not (each.partition(":")[0] in MODELS and each.partition(":")[2].isdecimal())
        ]
        least = [("rounds", self.sizes.rounds, 1)]
        check_minimums(least, [*unknown_parts(self.only, PARTS), *problems])


def run_plan(bench: PlanBench, *, console: RichConsole | None = None) -> PlanReport:
    """Measure in fresh processes.

    Raises:
        ConfigError: A rank failed; the message is the launcher's error block.
    """
    report = PlanReport(**measured_on())

    def plan(file: str) -> Plan:
        return msgspec.structs.replace(bench.sizes, parts=bench.only, out=file)

    with (console or RichConsole(stderr=True)).status(f"measuring {', '.join(bench.only)}"):
        report.asynchronous = figures_of(
            2, "braid.bench.workers.plan", plan, list[Measured], out=bench.out
        )
    save(report, bench.out / "plan.json")
    return report


def _ratio(row: Measured, way: str) -> float:
    """Return how many times as fast as the synchronous pipeline: the median over rounds."""
    pairs = zip(row.seconds[SYNCHRONOUS], row.seconds[way], strict=True)
    return statistics.median(other / own for other, own in pairs)


def plan_verdicts(report: PlanReport) -> Iterator[Verdict]:
    """Judge whether the asynchronous pipeline is as fast as promised."""
    for row in report.asynchronous:
        ratio = _ratio(row, "stash")
        claim = f"{row.name}: stashed weights at least {LEAST:g} times as fast as 1F1B of 4"
        yield Verdict(claim, f"measured {ratio:.2f}", ratio >= LEAST)


def plan_table(report: PlanReport) -> Table:
    """Make a table with one row per model and pipeline."""
    title = (
        f"{report.machine}, torch {report.torch}, load before {report.load:.1f} a core; 2 ranks, "
        "plain SGD, medians of rounds, x = time of 1F1B / this one's"
    )
    grid = new_table(title, ("model:rows", "weights"), ("samples/s", "x"))
    for row in report.asynchronous:
        for way, seconds in row.seconds.items():
            is_first = way == SYNCHRONOUS
            rate = row.amount / statistics.median(seconds)
            label = row.name if is_first else ""
            grid.add_row(label, way, f"{rate:.1f}", "" if is_first else f"{_ratio(row, way):.2f}")
    return grid


def print_plan(report: PlanReport, out: Path) -> None:
    """Print the table, the verdicts and the path of the figures."""
    show(plan_table(report), list(plan_verdicts(report)), out / "plan.json")
