"""Measure steps of strategies against steps of DataParallel and DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.workers.local_tasks import losses_of_steps
from benchmarks.workers.strategies import StepPlan, Steps, mirrored, workers
from braid.cli.bench.harness.ranks import figures_of
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums
from braid.runtime.terminal_table import new_table
from braid.runtime.text import duration_text

__all__ = ["BENCH", "StrategyBench", "StrategyReport"]

MOST = 1.05  # of the wrapper's seconds
MOST_APART = 1e-5  # losses of two systems
NUM_LOSSES = 50
WRAPPERS = {
    "MirroredStrategy": "DataParallel",
    "MultiWorkerMirroredStrategy": "DistributedDataParallel",
}


class StrategyReport(Report, kw_only=True):
    """Seconds of steps.

    Attributes:
        steps: Steps of each strategy.
        difference: Largest difference between a loss of TensorFlow's MultiWorkerMirroredStrategy
            and braid's; None without TensorFlow.
    """

    steps: dict[str, Steps] = msgspec.field(default_factory=dict)
    difference: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyBench:
    """Measure steps of MirroredStrategy and MultiWorkerMirroredStrategy against DDP wrappers.

    Attributes:
        model: Name of a GPT of `braid train`.
        batch: Number of rows in a step, over all replicas.
        n: Number of replicas.
        rounds: Number of steps of each, in turns.
        tensorflow: Python with tensorflow-cpu, to compare the losses of 50 steps.
        out: Directory for `strategies.json` and the logs.
    """

    model: str = "mini"
    batch: int = 16
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 2
    rounds: int = 30
    tensorflow: Path | None = None
    out: Path = Path("runs/bench-strategies")

    def __post_init__(self) -> None:
        least = [("batch", self.batch, self.n), ("n", self.n, 1), ("rounds", self.rounds, 1)]
        check_minimums(least)


def _measure(bench: StrategyBench, console: Console) -> StrategyReport:
    report = StrategyReport()
    plan = StepPlan(model=bench.model, batch=bench.batch, replicas=bench.n, rounds=bench.rounds)
    cases = zip(WRAPPERS, ((1, mirrored), (bench.n, workers)), strict=True)
    for name, (num_ranks, function) in cases:
        with console.status(f"{name} beside {WRAPPERS[name]}"):
            report.steps[name] = figures_of(num_ranks, function, plan, Steps, out=bench.out)
    if bench.tensorflow is not None:
        with console.status("losses of MultiWorkerMirroredStrategy beside TensorFlow's"):
            ours = losses_of_steps("braid_mirrored", NUM_LOSSES)
            theirs = losses_of_steps("tensorflow_mirrored", NUM_LOSSES, str(bench.tensorflow))
            report.difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return report


def _table(report: StrategyReport) -> Table:
    grid = new_table(report.place, ("strategy", "beside"), ("a step", "beside", "ratio"))
    for name, steps in report.steps.items():
        ours, theirs = (duration_text(s * 1e9) for s in (steps.strategy, steps.wrapper))
        grid.add_row(name, WRAPPERS[name], ours, theirs, f"{steps.ratio:.2f}")
    return grid


def _verdicts(report: StrategyReport) -> Iterator[BenchVerdict]:
    for name, steps in report.steps.items():
        claim = f"a step of {name} takes at most {MOST:g} times as long as {WRAPPERS[name]}'s"
        yield BenchVerdict(claim, f"measured {steps.ratio:.2f}", steps.ratio <= MOST)
    if report.difference is not None:
        claim = f"the losses of {NUM_LOSSES} steps are TensorFlow's to {MOST_APART:g}"
        met = report.difference <= MOST_APART
        yield BenchVerdict(claim, f"largest difference {report.difference:.1e}", met)


BENCH = Benchmark("strategies", StrategyBench, _measure, _table, _verdicts)
