"""`braid bench ddp`: what data parallel training costs over one process, by wrapper, as a table and as JSON.

Torch's wrapper over Gloo is what people have; the same over the backend "braid" is what changing one word gives them;
braid's own is the third. All run in the same processes in one run (`ddp_worker`).
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console as RichConsole
from rich.table import Table

from braid._version import __version__
from braid.bench.ddp_worker import MODEL_NAMES, VARIANTS, Measured, Plan
from braid.bench.machine import machine
from braid.bench.one_host import run_here
from braid.errors import ConfigError

__all__ = ["DdpBench", "DdpReport", "ddp_table", "print_ddp", "run_ddp", "share_text"]

BATCH = {"mlp": 64, "gpt": 2}
HEADINGS = {
    "alone": "none",
    "silent": "torch's DDP, sending nothing",
    "gloo": "torch's DDP, Gloo",
    "torch": "torch's DDP, braid",
    "braid": "braid's DDP",
}


class DdpReport(msgspec.Struct, kw_only=True):
    """Figures and where they were measured."""

    braid: str
    torch: str
    machine: str
    models: list[Measured]


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpBench:
    """What to measure.

    Attributes:
        ranks: World size.
        models: Out of mlp (25 million parameters) and gpt (likewise).
        batch: Samples or sequences of a rank in a step, by model.
        rounds: Steps of each wrapper, one in every round.
        out: Directory for `ddp.json` and the run's logs.
    """

    ranks: int = 2
    models: tuple[str, ...] = MODEL_NAMES
    batch: dict[str, int] = field(default_factory=lambda: dict(BATCH))
    rounds: int = 96
    out: Path = Path("runs/bench-ddp")

    def __post_init__(self) -> None:
        unknown = [name for name in self.models if name not in MODEL_NAMES]
        if unknown:
            msg = f"expected models out of {', '.join(MODEL_NAMES)}, found {', '.join(unknown)}"
            raise ConfigError(msg)
        least = [("ranks", self.ranks, 2), ("rounds", self.rounds, 1)]
        least += [(f"the batch of {name}", self.batch[name], 1) for name in self.models]
        problems = [f"{name} is {n}, expected {low} or more" for name, n, low in least if n < low]
        if problems:
            raise ConfigError("; ".join(problems))


def run_ddp(bench: DdpBench, *, console: RichConsole | None = None) -> DdpReport:
    """Measure in fresh processes.

    Args:
        bench: What to measure.
        console: Where it is shown that something happens; standard error when None.

    Raises:
        ConfigError: A rank failed; the message is the launcher's error block.
    """
    bench.out.mkdir(parents=True, exist_ok=True)
    figures = bench.out / "figures.json"
    plan = Plan(
        models=bench.models,
        batch=bench.batch,
        rounds=bench.rounds,
        out=str(figures.resolve()),
    )
    shown = console or RichConsole(stderr=True)
    with shown.status(f"training {' and '.join(bench.models)} on {bench.ranks} ranks"):
        encoded = msgspec.json.encode(plan)
        run_here(bench.ranks, "braid.bench.ddp_worker", encoded, log_dir=bench.out / "run")
    report = DdpReport(
        braid=__version__,
        torch=importlib.metadata.version("torch"),
        machine=machine(),
        models=msgspec.json.decode(figures.read_bytes(), type=list[Measured]),
    )
    (bench.out / "ddp.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    figures.unlink()
    return report


def share_text(found: Measured, variant: str) -> str:
    """How much of Gloo's exposed communication `variant` does not have, and how sure that is."""
    if variant not in found.gone:
        return ""
    if variant not in found.gone_between:
        return f"{found.gone[variant]:.0%} (or not: little to tell)"
    low, high = found.gone_between[variant]
    return f"{found.gone[variant]:.0%} ({low:.0%} to {high:.0%})"


def ddp_table(report: DdpReport) -> Table:
    """One row per model and wrapper."""
    title = f"{report.machine}, torch {report.torch}; median step, x = step of torch's DDP over Gloo / this one's"
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name, justify in (("model", "left"), ("wrapper", "left")):
        grid.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # a literal
    for name in ("ms", "x", "exposed ms", "of Gloo's exposed gone"):
        grid.add_column(name, justify="right", no_wrap=True)
    for found in report.models:
        what = f"{found.model} {found.num_params / 1e6:.1f} M, batch {found.batch} x {found.ranks}"
        for index, variant in enumerate(VARIANTS):
            step_s = found.step_s[variant]
            known = variant in found.exposed_s
            exposed = f"{found.exposed_s[variant] * 1e3:.1f}" if known else ""
            speedup = f"{found.speedup[variant]:.2f}" if variant in found.speedup else ""
            gone = share_text(found, variant)
            grid.add_row(
                "" if index else what,
                HEADINGS[variant],
                f"{step_s * 1e3:.1f}",
                speedup,
                exposed,
                gone,
            )
    return grid


def print_ddp(report: DdpReport, out: Path) -> None:
    """Show the table and say where the figures are."""
    console = RichConsole()
    if not console.is_terminal:
        console = RichConsole(width=120)
    console.print(ddp_table(report))
    console.print(f"figures  {out / 'ddp.json'}")
