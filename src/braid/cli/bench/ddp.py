"""`braid bench ddp`: measure the cost of data parallel training over one process, by wrapper.

The wrappers are torch's DistributedDataParallel over Gloo, the same over the backend "braid", and
braid's DistributedDataParallel. The same processes measure all of them in one run (`workers.ddp`).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

from rich.console import Console as RichConsole
from rich.table import Table

from braid.cli.bench.harness.options import Budget, Ranks, in_fields
from braid.cli.bench.harness.ranks import figures_of
from braid.cli.bench.harness.report import (
    Benchmark,
    BenchVerdict,
    Report,
    check_minimums,
    unknown,
    unsteady,
)
from braid.cli.bench.workers.ddp import LEAST_ROUNDS, VARIANTS, Case, DDPPlan, MeasuredCase, main
from braid.cli.bench.workers.ddp_models import MODEL_NAMES
from braid.runtime.terminal_table import add_group, new_table

__all__ = [
    "BENCH",
    "DdpBench",
    "DdpReport",
    "ddp_lines",
    "ddp_table",
    "ddp_verdicts",
    "share_text",
]

CASES = (
    Case("mlp", 64),
    Case("gpt", 2),
    Case("conv", 2),
    Case("mlp", 256),
    Case("gpt", 8),
    Case("conv", 8),
)
LEAST_GONE, LEAST_GONE_LOADED = 0.75, 0.6
AS_FAST = 0.98  # means of equal steps differ by up to 2%
LEAST_SPEEDUP = {"mlp": 1.2, "gpt": 1.1}
HEADINGS = {
    "alone": "none",
    "silent": "torch's DDP, sending nothing",
    "gloo": "torch's DDP, Gloo",
    "torch": "torch's DDP, braid",
    "braid": "braid's DDP",
}


class DdpReport(Report, kw_only=True):
    """Results of all models, measured while `busy` processes computed at the same time."""

    models: list[MeasuredCase]
    busy: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpBench:
    """Measure data parallel training: torch's DDP over Gloo and over braid, and braid's DDP.

    Attributes:
        ranks: World size.
        cases: Models with the batch of a rank: mlp and gpt (25 million parameters), conv (11
            million, with batch norm).
        rounds: Largest number of steps of each wrapper, in turns; results are medians over steps.
        budget_s: Seconds for a case, after which only the least number of rounds is completed.
        busy: Number of other processes that compute at the same time, one core each, to measure on
            a busy machine.
        out: Directory for `ddp.json` and the run's logs.
    """

    ranks: Ranks = 2
    cases: tuple[Annotated[Case, in_fields(Case)], ...] = CASES
    rounds: int = 96
    budget_s: Budget = 60.0
    busy: int = 0
    out: Path = Path("runs/bench-ddp")

    def __post_init__(self) -> None:
        least = [("ranks", self.ranks, 2), ("rounds", self.rounds, 1), ("busy", self.busy, 0)]
        least += [(f"the batch of {case.model}", case.batch, 1) for case in self.cases]
        check_minimums(least, unknown("model", (case.model for case in self.cases), MODEL_NAMES))


def _measure_ddp(bench: DdpBench, console: RichConsole) -> DdpReport:
    plan = DDPPlan(
        cases=bench.cases,
        rounds=bench.rounds,
        budget_s=bench.budget_s,
    )
    names = ", ".join(f"{case.model} ({case.batch})" for case in bench.cases)
    with console.status(f"training {names} on {bench.ranks} ranks"), _busy(bench.busy):
        models = figures_of(bench.ranks, main, plan, list[MeasuredCase], out=bench.out)
    return DdpReport(models=models, busy=bench.busy)


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Run processes that compute during the `with` block."""
    with ExitStack() as running:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            running.callback(process.wait)
            running.callback(process.kill)
        yield


def ddp_verdicts(report: DdpReport) -> list[BenchVerdict]:
    """Return the verdicts on the claims about braid's wrapper."""
    verdicts = []
    least_gone = LEAST_GONE_LOADED if report.busy else LEAST_GONE
    for model in report.models:
        what = f"{model.model}, batch {model.batch}"
        held = [
            (
                f"at least {least_gone:.0%} of Gloo's exposed communication gone",
                model.gone.get("braid"),
                least_gone,
            )
        ]
        least = LEAST_SPEEDUP.get(model.model)
        most = (
            model.step_s["gloo"] / model.step_s["silent"]
        )  # the bound is a step that sends nothing
        if least and most >= least and not report.busy:
            held.append((f"step at least {least} x Gloo's", model.speedup["braid"], least))
        beside = fmean(model.rounds_s["torch"]) / fmean(model.rounds_s["braid"])
        held.append(("not slower than torch's DDP over braid, except for noise", beside, AS_FAST))
        for text, figure, floor in held:
            shown = "too little is exposed" if figure is None else f"measured {figure:.2f}"
            holds = None if figure is None else figure >= floor
            verdicts.append(BenchVerdict(f"{what}: {text}", shown, holds))
    return verdicts


def ddp_lines(report: DdpReport) -> Iterator[object]:
    """Yield the verdicts, and a warning for each model with an unsteady measurement."""
    yield from ddp_verdicts(report)
    for model in [] if report.busy else report.models:
        label, seconds = f"{model.model}, batch {model.batch}", model.rounds_s["alone"]
        yield from unsteady(label, "steps without communication", seconds, LEAST_ROUNDS)


def share_text(model: MeasuredCase, variant: str) -> str:
    """Format the share of Gloo's exposed communication that `variant` saves, with its range."""
    if variant not in model.gone:
        return ""
    if variant not in model.gone_between:
        return f"{model.gone[variant]:.0%} (or not: too little is exposed)"
    low, high = model.gone_between[variant]
    return f"{model.gone[variant]:.0%} ({low:.0%} to {high:.0%})"


def ddp_table(report: DdpReport) -> Table:
    """Make a table with one row per model and wrapper."""
    title = (
        f"{report.system}; median step, x = step of torch's DDP over "
        "Gloo / this one's; exposed: means"
    )
    heads = ("ms", "x", "exposed ms", "of Gloo's exposed gone")
    grid = new_table(title, ("model", "wrapper"), heads)
    for model in report.models:
        what = f"{model.model} {model.num_params / 1e6:.1f} M, batch {model.batch} x {model.ranks}"
        rows = []
        for variant in VARIANTS:
            time = f"{model.step_s[variant] * 1e3:.1f}"
            speedup = f"{model.speedup[variant]:.2f}" if variant in model.speedup else ""
            is_known = variant in model.exposed_s
            exposed = f"{model.exposed_s[variant] * 1e3:.1f}" if is_known else ""
            gone = share_text(model, variant)
            rows.append((HEADINGS[variant], time, speedup, exposed, gone))
        add_group(grid, what, rows)
    return grid


BENCH = Benchmark("ddp", DdpBench, _measure_ddp, ddp_table, ddp_lines)
