"""Measure braid's pipeline against torch's, and against formulas.

Torch's pipelining over Gloo is the usual choice. Both train the same model with the same schedule,
in one run (`workers.pipeline`). In addition, a step is compared with its work plus the bubble of
the schedule, live bytes with the schedule's number of micro-batches, and step times over the number
of micro-batches with the simulator.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console as RichConsole
from rich.table import Table

from benchmarks.workers.pipeline import Case, Figures, Measured, Plan, main
from benchmarks.workers.pipeline_models import MODEL_NAMES, NUM_BLOCKS, TORCH_SCHEDULES
from benchmarks.workers.pipeline_parts import Held, Swept
from braid.cli.bench.harness.options import MIB, Budget, Ranks, in_fields
from braid.cli.bench.harness.ranks import figures_of
from braid.cli.bench.harness.report import (
    Benchmark,
    BenchVerdict,
    Report,
    check_minimums,
    unknown,
    unsteady,
)
from braid.cli.bench.harness.rounds import LEAST_ROUNDS
from braid.programs.schedule.pipeline import SCHEDULES
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
    "plot_sweep",
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
HELD_WITHIN = 0.1
MOST_ACTION_S = 100e-6
OPTIMUM_WITHIN = 0.05


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
        problems = []
        for case in self.cases:
            if case.model not in MODEL_NAMES:
                problems += unknown("model", [case.model], MODEL_NAMES)
            elif case.schedule not in TORCH_SCHEDULES:
                names = ", ".join(TORCH_SCHEDULES)
                problems.append(
                    f"{case.schedule} cannot be compared: choose a schedule out of {names}"
                )
            elif self.ranks > 1 and case.num_microbatches >= 1 and (text := self._problem(case)):
                problems.append(text)
        if self.sweep not in SWEEPS:
            problems.append(f"sweep must be microbatches, got {self.sweep!r}")
        least = [("ranks", self.ranks, 2), ("rounds", self.rounds, 1)]
        least += [
            (f"the number of micro-batches of {case.model}", case.num_microbatches, 1)
            for case in self.cases
        ]
        check_minimums(least, problems)

    def _problem(self, case: Case) -> str:
        stages = SCHEDULES[case.schedule](self.ranks, case.num_microbatches).header.num_units
        if NUM_BLOCKS % stages:
            return (
                f"{case.schedule} on {self.ranks} ranks has {stages} stages, among which the "
                f"{NUM_BLOCKS} blocks of {case.model} cannot be shared: use 2 or {NUM_BLOCKS} ranks"
            )
        if case.schedule == "interleaved" and case.num_microbatches % self.ranks:
            return (
                f"{case.num_microbatches} micro-batches are not a multiple of {self.ranks} ranks, "
                "which torch's interleaved schedule requires"
            )
        return ""


def _measure_pipeline(bench: PipelineBench, console: RichConsole) -> PipelineReport:
    cases = () if bench.sweep else bench.cases

    plan = Plan(
        cases=cases,
        rounds=bench.rounds,
        budget_s=bench.budget_s,
        held=() if bench.sweep else HELD,
        sweep=bench.swept if bench.sweep else None,
        numbers=SWEEPS[bench.sweep],
    )
    names = ", ".join(f"{case.model} ({case.schedule})" for case in cases) or bench.sweep
    with console.status(f"measuring {names} on {bench.ranks} ranks"):
        figures = figures_of(bench.ranks, main, plan, Figures, out=bench.out)
    swept = f"{bench.swept.model}, {bench.swept.schedule}" if bench.sweep else ""
    return PipelineReport(figures=figures, swept=swept)


def pipeline_verdicts(report: PipelineReport) -> list[BenchVerdict]:
    """Return the verdicts on the targets for braid's pipeline."""
    verdicts = []
    for row in report.figures.measured:
        verdicts += _verdicts_of(row)
    verdicts += [_held_verdict(held) for held in report.figures.held]
    if swept := report.figures.swept:
        best = _fastest(swept, "measured_s")
        chosen = _fastest(swept, "simulated_s")
        longer = chosen.measured_s / best.measured_s - 1
        claim = (
            f"the simulated optimum of {chosen.num_microbatches} micro-batches: a step at most "
            f"{OPTIMUM_WITHIN:.0%} longer than with the best number, {best.num_microbatches}"
        )
        verdicts.append(BenchVerdict(claim, f"measured {longer:.1%}", longer <= OPTIMUM_WITHIN))
    return verdicts


def pipeline_lines(report: PipelineReport) -> Iterator[object]:
    """Yield the verdicts, and warnings of cases in which other programs slowed the machine down."""
    yield from pipeline_verdicts(report)
    for row in report.figures.measured:
        label, seconds = f"{row.case.model}, {row.case.schedule}", row.rounds_s.get("compute", [])
        yield from unsteady(label, "work without messages", seconds, LEAST_ROUNDS)


def _verdicts_of(row: Measured) -> list[BenchVerdict]:
    what = f"{row.case.model}, {row.case.schedule}"
    verdicts = []
    if row.case.model == "tiny":
        verdicts.append(
            BenchVerdict(
                f"{what}: at most {MOST_ACTION_S * 1e6:.0f} us of the engine for an action",
                f"measured {row.action_s * 1e6:.0f} us",
                row.action_s <= MOST_ACTION_S,
            )
        )
    if least := LEAST_SPEEDUP.get(row.case.model):
        faster, exposed = row.speedup["braid"], max(0.0, 1 - row.efficiency["gloo"])
        figure = f"measured {faster:.2f} with {exposed:.0%} exposed"
        known = row.case.model != "wide" or exposed >= EXPOSED
        verdicts.append(
            BenchVerdict(
                f"{what}: step at least {least} x Gloo's"
                + f" if at least {EXPOSED:.0%} of it is exposed" * (row.case.model == "wide"),
                figure,
                faster >= least if known else None,
            )
        )
    if row.case.model == "compute":
        share = row.efficiency["braid"]
        claim = (
            f"{what}: at least {LEAST_EFFICIENCY:.0%} of a step are work and a bubble of "
            f"{_bubble(row):.1%}"
        )
        verdicts.append(BenchVerdict(claim, f"measured {share:.0%}", share >= LEAST_EFFICIENCY))
    return verdicts


def _held_verdict(held: Held) -> BenchVerdict:
    ratios = [a / b for a, b in zip(held.measured_bytes, held.formula_bytes, strict=True)]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return BenchVerdict(
        f"{_mode_text(held)}: live bytes within {HELD_WITHIN:.0%} of the formula",
        f"measured {worst:.3f} of it at worst",
        abs(worst - 1) <= HELD_WITHIN,
    )


def _bubble(row: Measured) -> float:
    """Return the bubble as a fraction of the step; `overhead` is its fraction of the work."""
    return row.overhead / (1 + row.overhead)


def _fastest(swept: list[Swept], by: str) -> Swept:
    return min(swept, key=lambda row: getattr(row, by))


def _mode_text(held: Held) -> str:
    return f"{held.schedule}{', recomputed' if held.recompute != 'never' else ''}"


def pipeline_tables(report: PipelineReport) -> list[Table]:
    """Make the tables of cases, live bytes and the sweep, as far as they were measured."""
    machine = f"{report.machine}, torch {report.torch}"
    figures = report.figures
    tables = []
    if figures.measured:
        tables.append(_case_table(machine, figures.measured))
    if figures.held:
        tables.append(_held_table(figures.held))
    if figures.swept:
        tables.append(_sweep_table(machine, figures.swept))
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
        cells = [f"{row.case.model}, {row.case.schedule}, {row.case.num_microbatches}"]
        cells += [bytes_text(row.boundary_bytes), f"{_bubble(row):.1%}"]
        cells += [f"{row.step_s[name] * 1e3:.1f}" for name in ("compute", "gloo")]
        cells.append(f"{row.efficiency['gloo']:.0%}")
        for name in ("torch", "braid"):
            cells += [f"{row.step_s[name] * 1e3:.1f}", f"{row.speedup[name]:.2f}"]
        grid.add_row(*cells, f"{row.efficiency['braid']:.0%}")
    return grid


def _held_table(rows: list[Held]) -> Table:
    title = "most MiB of activations at a time: measured / micro-batches x bytes of one"
    ranks = range(len(rows[0].measured_bytes))
    grid = new_table(title, ("schedule",), [f"rank {rank}" for rank in ranks])
    for row in rows:
        pairs = zip(row.measured_bytes, row.formula_bytes, strict=True)
        texts = [f"{measured / MIB:.1f} / {formula / MIB:.1f}" for measured, formula in pairs]
        grid.add_row(_mode_text(row), *texts)
    return grid


def _sweep_table(machine: str, swept: list[Swept]) -> Table:
    title = f"{machine}; ms of a step over the number of micro-batches of one batch"
    heads = ("micro-batches", "rows", "F", "B", "message", "measured", "simulated", "error")
    grid = new_table(title, (), heads)
    grid.add_column("optimum")
    best, chosen = _fastest(swept, "measured_s"), _fastest(swept, "simulated_s")
    for row in swept:
        marks = [name for name, at in (("measured", best), ("simulated", chosen)) if at is row]
        times = (row.forward_s, row.backward_s, row.message_s, row.measured_s, row.simulated_s)
        error = row.simulated_s / row.measured_s - 1
        cells = [f"{seconds * 1e3:.2f}" for seconds in times]
        texts = [str(row.num_microbatches), str(row.rows), *cells, f"{error:+.1%}"]
        grid.add_row(*texts, " and ".join(marks))
    return grid


def plot_sweep(report: PipelineReport, path: Path) -> Path:
    """Plot the time of a step over the number of micro-batches; the optimum is marked.

    Args:
        report: Report of a sweep.
        path: File, as PNG or SVG by its suffix.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(6.4, 4.0))
    axes = figure.add_subplot()
    swept = report.figures.swept
    numbers = [row.num_microbatches for row in swept]
    for by, style, colour in (("measured", "o-", "#4477aa"), ("simulated", "s--", "#ee6677")):
        key = f"{by}_s"
        axes.plot(numbers, [getattr(row, key) * 1e3 for row in swept], style, c=colour, label=by)
        best = _fastest(swept, key)
        axes.plot(
            [best.num_microbatches],
            [getattr(best, key) * 1e3],
            style[0],
            markersize=14,
            markerfacecolor="none",
            c=colour,
        )
    best = _fastest(swept, "measured_s")
    axes.annotate(
        f"optimum: {best.num_microbatches}",
        (best.num_microbatches, best.measured_s * 1e3),
        xytext=(0, 16),
        textcoords="offset points",
        ha="center",
    )
    axes.set(xscale="log", xlabel="micro-batches of one batch", ylabel="ms of a step")
    axes.set_xticks(numbers, labels=[str(number) for number in numbers])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)
    figure.suptitle(f"{report.swept}, {report.machine}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    return path


def draw_sweep(report: PipelineReport, out: Path) -> None:
    """Plot the sweep, if the report has one."""
    for suffix in ("png", "svg") if report.swept else ():
        plot_sweep(report, out / f"microbatches.{suffix}")


BENCH = Benchmark(
    "pipeline", PipelineBench, _measure_pipeline, pipeline_tables, pipeline_lines, draw_sweep
)
