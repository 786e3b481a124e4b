"""Compare Horovod's engine on braid with Gloo and with braid's DDP.

Figures that need ranks are measured on ranks (`workers.horovod`). The state machine also runs as a
thousand ranks in one process (`workers.many_ranks`), to compare the first rank's work in steady
state with the other ranks' work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console as RichConsole
from rich.table import Table

from benchmarks.workers.horovod import Exchange, Figures, Plan, Small, Step, main
from benchmarks.workers.many_ranks import Thousand, many_ranks
from braid.cli.bench.harness.options import Budget, Ranks, in_fields
from braid.cli.bench.harness.ranks import figures_of
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums, unknown
from braid.cli.bench.workers.ddp import Case
from braid.cli.bench.workers.ddp_models import MODEL_NAMES
from braid.runtime.terminal_table import new_table

__all__ = ["BENCH", "FusionBench", "FusionReport", "fusion_table", "fusion_verdicts"]

CASES = (Case("mlp", 64), Case("gpt", 2), Case("tiny", 32))
LEAST_SPEEDUP = 1.5
LONG_STEP_S, MOST_LONGER, MOST_LONGER_SHORT = 0.05, 0.10, 0.25
MOST_EXCHANGE_S, MOST_STATE_S = 200e-6, 30e-6
MOST_UNEVEN = 1.5
NUM_RANKS, NUM_TENSORS, NUM_CYCLES = 1000, 50, 12


class FusionReport(Report, kw_only=True):
    """Figures of the negotiated engine."""

    ranks: int
    small: Small
    steps: list[Step]
    exchanges: list[Exchange]
    thousand: Thousand


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionBench:
    """Measure Horovod's engine on braid against Gloo and braid's DDP.

    Attributes:
        ranks: World size.
        cases: Models with the batch of a rank: mlp and gpt (25 million parameters), conv, and tiny
            (a step of some milliseconds).
        rounds: Number of rounds of each case.
        budget_s: Approximate seconds for a case.
        out: Directory for `fusion.json` and the run's logs.
    """

    ranks: Ranks = 2
    cases: tuple[Annotated[Case, in_fields(Case)], ...] = CASES
    rounds: int = 60
    budget_s: Budget = 30.0
    out: Path = Path("runs/bench-horovod")

    def __post_init__(self) -> None:
        models = (case.model for case in self.cases)
        problems = unknown("model", models, sorted({*MODEL_NAMES, "tiny"}))
        least = [("ranks", self.ranks, 2), ("rounds", self.rounds, 2)]
        least += [(f"the batch of {case.model}", case.batch, 1) for case in self.cases]
        check_minimums(least, problems)


def _measure_fusion(bench: FusionBench, console: RichConsole) -> FusionReport:
    plan = Plan(cases=bench.cases, rounds=bench.rounds, budget_s=bench.budget_s)

    with console.status(f"small tensors, steps and exchanges on {bench.ranks} ranks"):
        figures = figures_of(bench.ranks, main, plan, Figures, out=bench.out)
    with console.status(f"{NUM_RANKS} ranks in one process"):
        thousand = many_ranks(NUM_RANKS, NUM_TENSORS, NUM_CYCLES)
    return FusionReport(ranks=bench.ranks, thousand=thousand, **msgspec.structs.asdict(figures))


def fusion_verdicts(report: FusionReport) -> list[BenchVerdict]:
    """Return the verdicts on the targets for the engine."""
    return [BenchVerdict(claim, f"measured {figure}", ok) for claim, ok, figure in _claims(report)]


def _claims(report: FusionReport) -> Iterator[tuple[str, bool, str]]:
    """Yield claims, whether they hold, and measured values."""
    speedup = report.small.speedup
    claim = f"200 small tensors at least {LEAST_SPEEDUP} x one all-reduce each through Gloo"
    yield claim, speedup >= LEAST_SPEEDUP, f"{speedup:.1f}"
    for step in report.steps:
        most = MOST_LONGER if step.seconds["ddp"] >= LONG_STEP_S else MOST_LONGER_SHORT
        claim = (
            f"{step.model}, batch {step.batch}: step at most {most:.0%} longer than with our DDP"
        )
        yield claim, step.longer <= most, f"{step.longer:.1%}"
    for exchange in report.exchanges:
        parts = (
            (f"exchange of {exchange.tensors} tensors", exchange.seconds, MOST_EXCHANGE_S),
            ("its pure part", exchange.state_s, MOST_STATE_S),
        )
        for name, seconds, most in parts:
            claim = f"{name} at most {most * 1e6:.0f} us"
            yield claim, seconds <= most, f"{seconds * 1e6:.0f} us"
    many = report.thousand
    share = many.first_calls / many.most_calls
    claim = (
        f"{many.ranks} ranks in steady state: the first needs at most {MOST_UNEVEN} times the "
        "calls of others"
    )
    figure = f"{share:.2f} times ({many.first_calls} calls), and it is asked {many.lists} times"
    yield claim, share <= MOST_UNEVEN and not many.lists, figure


def fusion_table(report: FusionReport) -> Table:
    """Make a table with one row per measurement."""
    title = f"{report.system}, {report.ranks} ranks; medians"
    grid = new_table(title, ("what",), ("ms", "ratio", "quartiles"))
    small, (low, high) = report.small, report.small.between
    ratios = {"engine": (f"{small.speedup:.1f} x", f"{low:.1f} to {high:.1f}")}
    for way, seconds in small.seconds.items():
        grid.add_row(f"200 tensors of 1 KiB, {way}", f"{seconds * 1e3:.2f}", *ratios.get(way, ()))
    for step in report.steps:
        what, (low, high) = f"{step.model}, batch {step.batch}", step.between
        ddp_ms, horovod_ms = (f"{step.seconds[way] * 1e3:.1f}" for way in ("ddp", "horovod"))
        grid.add_row(f"{what}: our DDP", ddp_ms)
        between = f"{low:+.1%} to {high:+.1%}"
        grid.add_row(f"{what}: Horovod's optimizer", horovod_ms, f"{step.longer:+.1%}", between)
    for exchange in report.exchanges:
        what = f"exchange in steady state, {exchange.tensors} tensors"
        grid.add_row(what, f"{exchange.seconds * 1e3:.3f}", f"{exchange.state_s * 1e6:.0f} us pure")
    many = report.thousand
    what = f"first of {many.ranks} ranks, {NUM_TENSORS} tensors"
    ratio = f"{many.first_s / many.median_s:.2f} x median"
    grid.add_row(what, f"{many.first_s * 1e3:.3f}", ratio)
    return grid


BENCH = Benchmark("fusion", FusionBench, _measure_fusion, fusion_table, fusion_verdicts)
