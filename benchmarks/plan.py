"""Measure the accuracy of plans.

steps             predicted steps and bytes of every kind of split, with one rank per core
oversubscribed    the same with two ranks per core
asynchronous      asynchronous pipelines against a synchronous one
device            a described device, fitted to published measurements
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import tyro
from rich.console import Console as RichConsole
from rich.table import Table

from benchmarks.device_fit import DeviceFit, fit_device, read_iterations
from benchmarks.workers import plan as asynchronous
from benchmarks.workers import plan_steps
from benchmarks.workers.plan_plan import (
    PARTS,
    SYNCHRONOUS,
    Plan,
    StepError,
    Steps,
    StepsPlan,
)
from benchmarks.workers.ps_plan import Measured
from braid.cli.bench.harness.ranks import figures_of
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums, unknown
from braid.runtime.terminal_table import add_group, new_table
from braid.train.config import MODELS

__all__ = [
    "BENCH",
    "PlanBench",
    "PlanReport",
    "plan_table",
    "plan_verdicts",
    "steps_table",
]

LEAST = 1.1  # samples per second relative to the synchronous pipeline
MEDIAN, P90, OVERSUBSCRIBED, BYTES = 0.07, 0.20, 0.25, 0.10  # largest errors
RANKED, WORSE = 0.95, 1.05  # rank correlation; best predicted over best measured
HALF, LARGER = 0.084, 0.10  # mean errors on vTrain's iterations
RANKS, MANY_RANKS = 2, 4


class PlanReport(Report, kw_only=True):
    """Figures of all parts that were measured.

    Attributes:
        steps: Predicted and measured steps with one rank per core.
        oversubscribed: The same with two ranks per core.
        asynchronous: Seconds of each pipeline, by model.
        device: Errors on vTrain's iterations.
    """

    steps: list[StepError] = msgspec.field(default_factory=list)
    oversubscribed: list[StepError] = msgspec.field(default_factory=list)
    device: DeviceFit | None = None
    asynchronous: list[Measured] = msgspec.field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBench:
    """Measure predictions of steps, and asynchronous pipelines against a synchronous one.

    Attributes:
        only: Names of the parts to measure, out of `PARTS`.
        sizes: Sizes of the measurements.
        out: Directory for `plan.json` and the log of the run.
    """

    only: tuple[str, ...] = PARTS
    sizes: Annotated[Plan, tyro.conf.arg(name="")] = field(default_factory=Plan)
    out: Path = Path("runs/bench-plan")

    def __post_init__(self) -> None:
        problems = [
            f"a model is NAME:ROWS, such as mini:4, with a name of {', '.join(MODELS)}: {text}"
            for text in self.sizes.models
            if not (text.partition(":")[0] in MODELS and text.partition(":")[2].isdecimal())
        ]
        problems += [
            f"a training is MODEL:BATCH:CONTEXT, such as mini:16:128, got {text}"
            for text in self.sizes.steps
            if _steps_of(text, 1) is None
        ]
        least = [("rounds", self.sizes.rounds, 1)]
        check_minimums(least, [*unknown("part", self.only, PARTS), *problems])


def _measure_plan(bench: PlanBench, console: RichConsole) -> PlanReport:
    report = PlanReport()

    sizes = bench.sizes
    with console.status(f"measuring {', '.join(bench.only)}"):
        if "steps" in bench.only:
            report.steps = _step_errors(RANKS, sizes.steps, sizes.rounds, bench.out)
        if "oversubscribed" in bench.only:
            report.oversubscribed = _step_errors(
                MANY_RANKS, sizes.steps[:1], sizes.rounds, bench.out
            )
        if "asynchronous" in bench.only:
            report.asynchronous = figures_of(
                RANKS, asynchronous.main, sizes, list[Measured], out=bench.out
            )
        if "device" in bench.only and sizes.vtrain:
            report.device = fit_device(read_iterations(sizes.vtrain))
    return report


def _steps_of(text: str, rounds: int) -> Steps | None:
    """Return the training for a text such as mini:16:128; None for an invalid text."""
    name, *numbers = text.split(":")
    if name not in MODELS or len(numbers) != 2 or not all(n.isdecimal() for n in numbers):
        return None
    batch, context = map(int, numbers)
    return Steps(model=name, batch=batch, context=context, rounds=rounds)


def _step_errors(num_ranks: int, texts: Sequence[str], rounds: int, out: Path) -> list[StepError]:
    steps = [parsed for text in texts if (parsed := _steps_of(text, rounds)) is not None]
    return figures_of(
        num_ranks,
        plan_steps.main,
        StepsPlan(steps=steps),
        list[StepError],
        out=out,
        run=f"steps-{num_ranks}",
    )


def plan_verdicts(report: PlanReport) -> Iterator[BenchVerdict]:
    """Yield the verdicts on the targets for predictions and asynchronous pipelines."""
    if report.steps:
        yield from _step_verdicts(report.steps)
    if report.oversubscribed:
        error = statistics.median(abs(row.error) for row in report.oversubscribed)
        claim = f"{MANY_RANKS} ranks: median error of a step at most {100 * OVERSUBSCRIBED:g} %"
        yield BenchVerdict(claim, f"measured {100 * error:.1f} %", error <= OVERSUBSCRIBED)
    if report.device is not None:
        for text, error, most in (
            ("the other half", report.device.half, HALF),
            ("8 GPUs, from 2 and 4", report.device.larger, LARGER),
        ):
            claim = f"vTrain's iterations, {text}: mean error at most {100 * most:g} %"
            yield BenchVerdict(claim, f"got {100 * error:.2f} %", error <= most)
    for row in report.asynchronous:
        ratio = row.ratio(SYNCHRONOUS, "stash")
        claim = f"{row.name}: stashed weights at least {LEAST:g} times as fast as 1F1B of 4"
        yield BenchVerdict(claim, f"measured {ratio:.2f}", ratio >= LEAST)


def _step_verdicts(rows: Sequence[StepError]) -> Iterator[BenchVerdict]:
    from scipy.stats import spearmanr

    errors = sorted(abs(row.error) for row in rows)
    median, p90 = statistics.median(errors), errors[int(0.9 * (len(errors) - 1))]
    ranked = float(spearmanr([r.predicted_s for r in rows], [r.measured_s for r in rows])[0])
    nbytes = statistics.median(abs(row.bytes_error) for row in rows)
    worst = 0.0
    for model in {row.model for row in rows}:
        of_model = [row for row in rows if row.model == model]
        chosen = min(of_model, key=lambda row: row.predicted_s)
        worst = max(worst, chosen.measured_s / min(row.measured_s for row in of_model))
    for claim, value, text, holds in (
        ("median error of a step", MEDIAN, f"{100 * median:.1f} %", median <= MEDIAN),
        ("90 % of errors", P90, f"{100 * p90:.1f} %", p90 <= P90),
        ("median error of live bytes", BYTES, f"{100 * nbytes:.1f} %", nbytes <= BYTES),
    ):
        yield BenchVerdict(f"{claim} at most {100 * value:g} %", f"measured {text}", holds)
    yield BenchVerdict(
        f"rank correlation at least {RANKED:g}", f"measured {ranked:.3f}", ranked >= RANKED
    )
    yield BenchVerdict(
        f"the split predicted to be best at most {WORSE:g} times as long as the best",
        f"measured {worst:.2f}",
        worst <= WORSE,
    )


def steps_table(rows: Sequence[StepError]) -> Table:
    """Make a table with one row per training and split."""
    title = f"{rows[0].ranks} ranks: predicted and measured steps in ms, live bytes in MB"
    columns = ("predicted", "measured", "error %", "predicted MB", "measured MB", "error %")
    grid = new_table(title, ("model:batch:context", "split"), columns)
    model = ""
    for row in rows:
        grid.add_row(
            row.model if row.model != model else "",
            row.split,
            f"{1e3 * row.predicted_s:.1f}",
            f"{1e3 * row.measured_s:.1f}",
            f"{100 * row.error:+.1f}",
            f"{row.predicted_bytes / 1e6:.1f}",
            f"{row.measured_bytes / 1e6:.1f}",
            f"{100 * row.bytes_error:+.1f}",
        )
        model = row.model
    return grid


def plan_table(report: PlanReport) -> Table:
    """Make a table with one row per model and pipeline."""
    title = f"{report.place}; 2 ranks, plain SGD, medians of rounds, x = time of 1F1B / this one's"
    grid = new_table(title, ("model:rows", "weights"), ("samples/s", "x"))
    for row in report.asynchronous:
        rows = []
        for way in row.seconds:
            ratio = "" if way == SYNCHRONOUS else f"{row.ratio(SYNCHRONOUS, way):.2f}"
            rows.append((way, f"{row.amount / row.median_s(way):.1f}", ratio))
        add_group(grid, row.name, rows)
    return grid


def plan_tables(report: PlanReport) -> list[Table]:
    """Make a table for each part that was measured."""
    tables = [steps_table(rows) for rows in (report.steps, report.oversubscribed) if rows]
    return [*tables, *([plan_table(report)] if report.asynchronous else [])]


BENCH = Benchmark("plan", PlanBench, _measure_plan, plan_tables, plan_verdicts)
