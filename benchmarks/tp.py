"""Measure braid's tensor parallelism against transformers' and torch's.

transformers' plan and torch's `parallelize_module`, both with DTensor over Gloo, are the usual
choices. All divide the same models, in one run (`workers.tp`).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console as RichConsole
from rich.table import Table

from benchmarks.workers.tp import HEADS, KV_HEADS, MODEL_NAMES, VARIANTS, Case, Measured, Plan, main
from braid.cli.bench.harness.options import Budget, Ranks, in_fields
from braid.cli.bench.harness.ranks import figures_of
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums, unknown
from braid.runtime.terminal_table import new_table

__all__ = ["BENCH", "CASES", "TpBench", "TpReport"]

CASES = (
    Case("llama", 128, 4, 2, 64),
    Case("qwen2", 128, 4, 2, 64),
    Case("mistral", 64, 2, 2, 32),
)
LEAST_SPEEDUP = {
    "transformers": (2.5, "transformers' own plan over Gloo"),
    "torch": (1.5, "parallelize_module over Gloo"),
    "transformers_braid": (1.5, 'transformers\' own plan over "braid"'),
    "torch_braid": (1.5, 'parallelize_module over "braid"'),
}
MOST_GAP = 1e-5


class TpReport(Report, kw_only=True):
    """Figures of all cases."""

    rows: list[Measured]


@dataclass(frozen=True, kw_only=True, slots=True)
class TpBench:
    """Measure tensor parallelism: transformers' plan, torch's, and braid's.

    Attributes:
        ranks: World size.
        cases: Models (llama, mistral, qwen2) with width, layers, sequences and positions.
        rounds: Largest number of rounds, with one step of each engine.
        budget_s: Seconds for a case, after which only the smallest number of rounds is completed.
        out: Directory for `tp.json` and the run's logs.
    """

    ranks: Ranks = 2
    cases: tuple[Annotated[Case, in_fields(Case)], ...] = CASES
    rounds: int = 60
    budget_s: Budget = 40.0
    out: Path = Path("runs/bench-tp")

    def __post_init__(self) -> None:
        problems = unknown("model", (case.model for case in self.cases), MODEL_NAMES)
        if self.ranks > 1 and KV_HEADS % self.ranks:
            problems.append(f"{KV_HEADS} heads of keys cannot be divided over {self.ranks} ranks")
        problems += [
            f"a width of {case.width} is not a multiple of {HEADS} heads"
            for case in self.cases
            if case.width % HEADS
        ]
        if importlib.util.find_spec("transformers") is None:
            problems.append(
                "the models are from transformers, which is not installed: "
                "pip install 'braid-train[hf]'"
            )
        least = [("ranks", self.ranks, 2), ("rounds", self.rounds, 1)]
        least += [(f"layers of {case.model}", case.layers, 1) for case in self.cases]
        check_minimums(least, problems)


def _measure_tp(bench: TpBench, console: RichConsole) -> TpReport:
    plan = Plan(
        cases=bench.cases,
        rounds=bench.rounds,
        budget_s=bench.budget_s,
    )
    names = ", ".join(f"{case.model} of width {case.width}" for case in bench.cases)
    with console.status(f"measuring {names} on {bench.ranks} ranks"):
        rows = figures_of(bench.ranks, main, plan, list[Measured], out=bench.out)
    return TpReport(rows=rows)


def tp_verdicts(report: TpReport) -> list[BenchVerdict]:
    """Return the verdicts on the targets for braid's tensor parallelism."""
    verdicts = []
    for row in report.rows:
        what = f"{row.case.model}, width {row.case.width}"
        for variant, (least, name) in LEAST_SPEEDUP.items():
            factor = row.speedup[variant]
            claim = f"{what}: step at least {least} x as fast as {name}"
            verdicts.append(BenchVerdict(claim, f"measured {factor:.2f}", factor >= least))
        claim = f"{what}: the number of collectives in the explanation is right"
        figure = f"{row.collectives} counted, {row.sent} sent"
        verdicts.append(BenchVerdict(claim, figure, row.collectives == row.sent))
        claim = f"{what}: losses of all engines within {MOST_GAP:g}"
        gap = row.largest_gap
        verdicts.append(BenchVerdict(claim, f"measured {gap:.1e}", gap <= MOST_GAP))
    return verdicts


def tp_tables(report: TpReport) -> list[Table]:
    """Make the table of steps: a row for each engine."""
    title = (
        f"{report.system}: median ms of a step on "
        f"{report.rows[0].ranks} ranks\nx: this engine's step / braid's by the graph"
    )
    heads = [text for row in report.rows for text in (_name_of(row.case), "x")]
    grid = new_table(title, ("engine",), heads)
    for name in VARIANTS:
        cells = []
        for row in report.rows:
            cells += [f"{row.step_s[name] * 1e3:.1f}", f"{row.speedup[name]:.2f}"]
        grid.add_row(name.replace("_", ", "), *cells)
    return [grid]


def _name_of(case: Case) -> str:
    return f"{case.model} {case.width}, {case.layers} layers"


BENCH = Benchmark("tp", TpBench, _measure_tp, tp_tables, tp_verdicts)
