"""Measure steps and bytes of sharded training against torch's FSDP2.

FSDP2 over Gloo is the usual choice without GPUs; FSDP2 over the backend "braid" needs a change of
one word; braid's engine is the third candidate. The same processes run all of them in one run
(`workers.zero`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console as RichConsole
from rich.table import Table

from benchmarks.workers import saving
from benchmarks.workers.zero import MODEL_NAMES, STAGES, VARIANTS, Case, Measured, Plan, main
from braid.cli.bench.harness.options import Budget, Ranks, in_fields
from braid.cli.bench.harness.ranks import figures_of
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums, unknown
from braid.runtime.terminal_table import add_group, new_table

__all__ = ["BENCH", "CASES", "ZeroBench", "ZeroReport"]

CASES = (Case("gpt", 1), Case("gpt", 4), Case("mlp", 64))
LEAST_SPEEDUP = 1.5
MOST_OVER = 0.1  # largest deviation from the formula, without slots
HEADINGS = {
    "alone": "none",
    "fsdp2": "torch's FSDP2, Gloo",
    "fsdp2_braid": "torch's FSDP2, braid",
    "ddp": "braid's DDP",
    "stage1": "braid, stage 1",
    "stage2": "braid, stage 2",
    "stage3": "braid, stage 3",
}
MOST_STALL = 0.1
SENT = {"stage1": 2, "stage2": 2, "stage3": 3}


class ZeroReport(Report, kw_only=True):
    """Figures of all cases."""

    rows: list[Measured]
    saves: saving.Saves | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroBench:
    """Measure sharded training: torch's FSDP2 over Gloo and over braid, and braid's stages.

    Attributes:
        ranks: World size.
        cases: Models with the batch of a rank: gpt and mlp (25 million parameters), and tiny
            (only the engines' overhead).
        rounds: Largest number of rounds, with one step of each engine.
        budget_s: Seconds for a case, after which only the smallest number of rounds is completed.
        save_mib: MiB of a checkpoint that is saved synchronously and in the background; 0 for none.
        save_rounds: Number of saves of each kind.
        out: Directory for `zero.json` and the run's logs.
    """

    ranks: Ranks = 2
    cases: tuple[Annotated[Case, in_fields(Case)], ...] = CASES
    rounds: int = 40
    budget_s: Budget = 40.0
    save_mib: int = 1024
    save_rounds: int = 5
    out: Path = Path("runs/bench-zero")

    def __post_init__(self) -> None:
        problems = unknown("model", (case.model for case in self.cases), MODEL_NAMES)
        least = [("ranks", self.ranks, 2), ("rounds", self.rounds, 1)]
        least += [("save_mib", self.save_mib, 0), ("save_rounds", self.save_rounds, 1)]
        least += [(f"the batch of {case.model}", case.batch, 1) for case in self.cases]
        check_minimums(least, problems)


def _measure_zero(bench: ZeroBench, console: RichConsole) -> ZeroReport:
    plan = Plan(
        cases=bench.cases,
        rounds=bench.rounds,
        budget_s=bench.budget_s,
    )
    names = ", ".join(f"{case.model} ({case.batch})" for case in bench.cases)
    with console.status(f"training {names} on {bench.ranks} ranks"):
        rows = figures_of(bench.ranks, main, plan, list[Measured], out=bench.out)
    report = ZeroReport(rows=rows)
    if bench.save_mib:
        with console.status(f"saving {bench.save_mib} MiB from {bench.ranks} ranks"):
            report.saves = _measure_saves(bench)
    return report


def _measure_saves(bench: ZeroBench) -> saving.Saves:
    plan = saving.Plan(
        mib=bench.save_mib,
        rounds=bench.save_rounds,
        directory=str((bench.out / "saves").resolve()),
    )
    return figures_of(bench.ranks, saving.main, plan, saving.Saves, out=bench.out, run="run-saves")


def zero_verdicts(report: ZeroReport) -> list[BenchVerdict]:
    """Return the verdicts on the targets for braid's sharding."""
    verdicts = []
    for row in report.rows:
        what = f"{row.case.model}, batch {row.case.batch}"
        factor = row.speedup["stage3"]
        claim = f"{what}: stage 3 at least {LEAST_SPEEDUP} x as fast as FSDP2 over Gloo"
        verdicts.append(BenchVerdict(claim, f"measured {factor:.2f}", factor >= LEAST_SPEEDUP))
        for stage in STAGES:
            live = row.live[stage]
            over = (live.peak - live.slots) / live.formula - 1
            claim = f"{what}: {stage} holds the bytes of its formula, and slots, within 10%"
            verdicts.append(BenchVerdict(claim, f"measured {over:+.1%}", abs(over) <= MOST_OVER))
            claim = f"{what}: {stage} sends at most {SENT[stage]} x the parameters, and padding"
            held = live.sent <= SENT[stage] * 1.01
            verdicts.append(BenchVerdict(claim, f"measured {live.sent:.2f}", held))
    if (saves := report.saves) is not None:
        share = saves.stall_s / saves.at_once_s
        claim = (
            f"a background save of {saves.mib} MiB: training waits less than {MOST_STALL:.0%} "
            f"of the {saves.at_once_s:.2f} s of a synchronous save"
        )
        slower = saves.step_behind_s / saves.step_s
        figure = (
            f"measured {share:.1%}, {saves.stall_s:.3f} s; written in {saves.write_s:.2f} s, in "
            f"which a step takes {slower:.2f} x as long"
        )
        verdicts.append(BenchVerdict(claim, figure, share < MOST_STALL))
    return verdicts


def zero_table(report: ZeroReport) -> Table:
    """Make a table with one row per model and engine."""
    title = (
        f"{report.system}; median step, x = step of FSDP2 over Gloo / this one's; bytes of a rank"
    )
    heads = ("ms", "x", "MiB held", "of them slots", "formula", "sent / params")
    grid = new_table(title, ("model", "engine"), heads)
    for row in report.rows:
        case = row.case
        what = f"{case.model} {row.num_params / 1e6:.1f} M, batch {case.batch} x {row.ranks}"
        rows = []
        for variant in VARIANTS:
            cells = [f"{row.step_s[variant] * 1e3:.1f}", f"{row.speedup[variant]:.2f}"]
            if variant in row.live:
                live = row.live[variant]
                cells += [f"{n / (1 << 20):.0f}" for n in (live.peak, live.slots, live.formula)]
                cells.append(f"{live.sent:.2f}")
            rows.append((HEADINGS[variant], *cells))
        add_group(grid, what, rows)
    return grid


BENCH = Benchmark("zero", ZeroBench, _measure_zero, zero_table, zero_verdicts)
