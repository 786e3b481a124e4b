"""Measure steps of a placed model against steps of a pipeline with one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.workers.placed import PlacedPlan, PlacedSteps, compare
from braid.cli.bench.harness.ranks import figures_of
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums
from braid.runtime.terminal_table import new_table
from braid.runtime.text import duration_text

__all__ = ["BENCH", "PlacedBench", "PlacedReport"]

MOST = 1.05  # of the pipeline's seconds


class PlacedReport(Report, kw_only=True):
    """Seconds of steps.

    Attributes:
        steps: Steps by name of the model.
    """

    steps: dict[str, PlacedSteps] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedBench:
    """Measure steps of a GPT in two placed parts against a pipeline with one micro-batch.

    Attributes:
        models: Names of GPTs of `braid train`.
        batch: Number of rows in a step.
        context: Number of bytes in a row.
        rounds: Number of steps of each, in turns.
        out: Directory for `placed.json` and the logs.
    """

    models: tuple[str, ...] = ("tiny", "mini")
    batch: int = 16
    context: int = 128
    rounds: int = 30
    out: Path = Path("runs/bench-placed")

    def __post_init__(self) -> None:
        least = [("batch", self.batch, 3), ("context", self.context, 1), ("rounds", self.rounds, 1)]
        check_minimums(least)


def _measure(bench: PlacedBench, console: Console) -> PlacedReport:
    report = PlacedReport()
    for model in bench.models:
        plan = PlacedPlan(
            model=model, batch=bench.batch, context=bench.context, rounds=bench.rounds
        )
        with console.status(f"a placed gpt-{model} beside a pipeline"):
            report.steps[model] = figures_of(2, compare, plan, PlacedSteps, out=bench.out)
    return report


def _table(report: PlacedReport) -> Table:
    grid = new_table(report.place, ("model",), ("placed", "pipeline", "ratio", "ratio of quickest"))
    for name, steps in report.steps.items():
        ours, theirs = (duration_text(s * 1e9) for s in (steps.placed, steps.pipeline))
        ratios = f"{steps.ratio:.2f}", f"{steps.quickest_ratio:.2f}"
        grid.add_row(f"gpt-{name}", ours, theirs, *ratios)
    return grid


def _verdicts(report: PlacedReport) -> Iterator[BenchVerdict]:
    for name, steps in report.steps.items():
        claim = (
            f"a step of a placed gpt-{name} takes at most {MOST:g} times as long as a pipeline's"
        )
        yield BenchVerdict(claim, f"measured {steps.ratio:.2f}", steps.ratio <= MOST)
        claim = f"losses of gpt-{name} have the bits of the pipeline's"
        yield BenchVerdict(claim, "equal" if steps.is_equal else "different", steps.is_equal)


BENCH = Benchmark("placed", PlacedBench, _measure, _table, _verdicts)
