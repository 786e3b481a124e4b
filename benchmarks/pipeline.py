"""Measure braid's pipeline against torch's, and against formulas.

Torch's pipelining over Gloo is the usual choice. Both train the same model with the same schedule,
in one run (`workers.pipeline`). In addition, a step is compared with its work plus the bubble of
the schedule, live bytes with the schedule's number of micro-batches, and step times over the number
of micro-batches with the simulator (`pipeline_formulas`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console as RichConsole
from rich.table import Table

from benchmarks.pipeline_formulas import (
    held_table,
    held_verdict,
    plot_sweep,
    sweep_table,
    sweep_verdict,
)
from benchmarks.workers.pipeline import Case, Figures, Measured, Plan, main
from braid.cli.bench.harness.options import Budget, Ranks, in_fields
from braid.cli.bench.harness.ranks import figures_of
from braid.cli.bench.harness.report import (
    Benchmark,
    BenchVerdict,
    Report,
    check_minimums,
    unsteady,
)
from braid.cli.bench.harness.rounds import LEAST_ROUNDS
from braid.runtime.terminal_table import new_table
from braid.runtime.text import bytes_text

__all__ = [
    "BENCH",
    "CASES",
    "PipelineBench",
    "PipelineReport",
    "pipeline_lines",
    "pipeline_tables",
    "pipeline_verdicts",
]

CASES = (
    Case("wide", "1f1b", 8),
    Case("wide", "gpipe", 8),
    Case("compute", "1f1b", 8),
    Case("compute", "gpipe", 8),
    Case("compute", "interleaved", 8),
    Case("tiny", "1f1b", 64),
)
HELD = (
    ("gpipe", "never"),
    ("1f1b", "never"),
    ("interleaved", "never"),
    ("gpipe", "always"),
    ("1f1b", "always"),
)
SWEEPS = {"": (), "microbatches": (1, 2, 4, 8, 16, 32)}
SWEPT = Case("compute", "1f1b", 8)
EXPOSED = 0.2  # fraction of Gloo's step; with less, the wide case is inconclusive
LEAST_SPEEDUP = {"wide": 1.15, "compute": 0.99}
LEAST_EFFICIENCY = 0.9
MOST_ACTION_S = 40e-6


class PipelineReport(Report, kw_only=True):
    """Figures of all cases; `swept` names the case of a sweep."""

    figures: Figures
    swept: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineBench:
    """Measure pipelines: torch's over Gloo and over braid, braid's own, and their formulas.

    Attributes:
        ranks: World size.
        cases: Models with a schedule and the number of micro-batches: wide (4 MiB at a boundary,
            little work), compute (much work) and tiny (only the engine's overhead); gpipe, 1f1b or
            interleaved.
        rounds: Largest number of rounds, with one step of each engine.
        budget_s: Seconds for a case, after which only the smallest number of rounds is completed.
        sweep: `microbatches` to vary their number instead of measuring cases; empty otherwise.
        swept: Case in which the number of micro-batches is varied.
        out: Directory for `pipeline.json`, the sweep's pictures if matplotlib is installed, and
            the run's logs.
    """

    ranks: Ranks = 2
    cases: tuple[Annotated[Case, in_fields(Case)], ...] = CASES
    rounds: int = 60
    budget_s: Budget = 20.0
    sweep: str = ""
    swept: Annotated[Case, in_fields(Case)] = SWEPT
    out: Path = Path("runs/bench-pipeline")

    def __post_init__(self) -> None:
        problems = [text for case in self.cases for text in case.problems(self.ranks)]
        if self.sweep not in SWEEPS:
            problems.append(f"sweep must be microbatches, got {self.sweep!r}")
        least = [("ranks", self.ranks, 2), ("rounds", self.rounds, 1)]
        least += [
            (f"the number of micro-batches of {case.model}", case.num_microbatches, 1)
            for case in self.cases
        ]
        check_minimums(least, problems)


def _measure_pipeline(bench: PipelineBench, console: RichConsole) -> PipelineReport:
    plan = Plan(rounds=bench.rounds, budget_s=bench.budget_s, cases=bench.cases, held=HELD)
    names = ", ".join(f"{case.model} ({case.schedule})" for case in bench.cases)
    swept = ""
    if bench.sweep:
        plan = Plan(
            rounds=bench.rounds,
            budget_s=bench.budget_s,
            sweep=bench.swept,
            numbers=SWEEPS[bench.sweep],
        )
        names, swept = bench.sweep, bench.swept.label
    with console.status(f"measuring {names} on {bench.ranks} ranks"):
        figures = figures_of(bench.ranks, main, plan, Figures, out=bench.out)
    return PipelineReport(figures=figures, swept=swept)


def pipeline_verdicts(report: PipelineReport) -> list[BenchVerdict]:
    """Return the verdicts on the targets for braid's pipeline."""
    figures = report.figures
    verdicts = [verdict for row in figures.measured for verdict in _case_verdicts(row)]
    verdicts += map(held_verdict, figures.held)
    return [*verdicts, sweep_verdict(figures.swept)] if figures.swept else verdicts


def pipeline_lines(report: PipelineReport) -> Iterator[object]:
    """Yield the verdicts, and warnings of cases in which other programs slowed the machine down."""
    yield from pipeline_verdicts(report)
    for row in report.figures.measured:
        seconds = row.rounds_s.get("compute", [])
        yield from unsteady(row.case.label, "work without messages", seconds, LEAST_ROUNDS)


def _case_verdicts(row: Measured) -> Iterator[BenchVerdict]:
    model, what = row.case.model, row.case.label
    if model == "tiny":
        limit, action_us = MOST_ACTION_S * 1e6, row.action_s * 1e6
        claim = f"{what}: at most {limit:.0f} us of the engine for an action"
        yield BenchVerdict(claim, f"measured {action_us:.0f} us", row.action_s <= MOST_ACTION_S)
    if least := LEAST_SPEEDUP.get(model):
        faster, exposed = row.speedup["braid"], max(0.0, 1 - row.efficiency["gloo"])
        claim = f"{what}: step at least {least} x Gloo's"
        if model == "wide":
            claim += f" if at least {EXPOSED:.0%} of it is exposed"
        is_known = model != "wide" or exposed >= EXPOSED
        figure = f"measured {faster:.2f} with {exposed:.0%} exposed"
        yield BenchVerdict(claim, figure, faster >= least if is_known else None)
    if model == "compute":
        share, bubble = row.efficiency["braid"], f"a bubble of {row.bubble:.1%}"
        claim = f"{what}: at least {LEAST_EFFICIENCY:.0%} of a step are work and {bubble}"
        yield BenchVerdict(claim, f"measured {share:.0%}", share >= LEAST_EFFICIENCY)


def pipeline_tables(report: PipelineReport) -> list[Table]:
    """Make the tables of cases, live bytes and the sweep, as far as they were measured."""
    figures = report.figures
    tables = []
    if figures.measured:
        tables.append(_case_table(report.system, figures.measured))
    if figures.held:
        tables.append(held_table(figures.held))
    if figures.swept:
        tables.append(sweep_table(report.system, figures.swept))
    return tables


def _case_table(machine: str, measured: list[Measured]) -> Table:
    title = (
        f"{machine}; model, schedule, micro-batches: median ms of a step\n"
        "x: step of torch's pipelining over Gloo / this one's; explained: work and bubble in a step"
    )
    heads = ("boundary", "bubble", "work", "Gloo", "explained", "torch, braid", "x")
    grid = new_table(title, ("case",), (*heads, "braid", "x", "explained"))
    grid.collapse_padding = True
    for row in measured:
        cells = [f"{row.case.label}, {row.case.num_microbatches}"]
        cells += [bytes_text(row.boundary_bytes), f"{row.bubble:.1%}"]
        cells += [f"{row.step_s[name] * 1e3:.1f}" for name in ("compute", "gloo")]
        cells.append(f"{row.efficiency['gloo']:.0%}")
        for name in ("torch", "braid"):
            cells += [f"{row.step_s[name] * 1e3:.1f}", f"{row.speedup[name]:.2f}"]
        grid.add_row(*cells, f"{row.efficiency['braid']:.0%}")
    return grid


def _draw(report: PipelineReport, out: Path) -> None:
    title = f"{report.swept}, {report.machine}"
    for suffix in ("png", "svg") if report.swept else ():
        plot_sweep(report.figures.swept, title, out / f"microbatches.{suffix}")


BENCH = Benchmark(
    "pipeline", PipelineBench, _measure_pipeline, pipeline_tables, pipeline_lines, _draw
)
