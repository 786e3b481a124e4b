"""Compare communication hooks over a slow network, in time and in loss.

Two hosts (namespaces of this machine, `lab`) train a model that is bound by communication: 25
million parameters, few samples. The figures are the time of a whole step, and the loss after the
same number of steps, compared with exact gradients (`workers.hooks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console as RichConsole
from rich.table import Table

from benchmarks.lab import Lab
from benchmarks.workers.hooks import EXACT, Plan, Way, main
from braid.cli.bench.harness.options import GBIT
from braid.cli.bench.harness.ranks import figures_there
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums
from braid.runtime.terminal_table import new_table

__all__ = ["BENCH", "HooksBench", "HooksReport", "hooks_table", "hooks_verdicts"]

HOOKS = ("bf16", "int8", "topk:0.01", "powersgd:rank=4,start=2")
LEAST = {"bf16": 1.6, "topk": 3.0, "powersgd": 4.0}  # least speed-up of a step, at 1 Gbit/s
LOSS_HELD = 1.1  # largest loss, relative to that with exact gradients
LEARNED = 0.5  # fraction of the first loss; with a larger loss, hooks cannot be compared


class HooksReport(Report, kw_only=True):
    """Figures of all hooks."""

    gbit: float
    hosts: int
    batch: int
    rounds: int
    ways: list[Way]


@dataclass(frozen=True, kw_only=True, slots=True)
class HooksBench:
    """Measure communication hooks over a slow network of namespaces (as root).

    Attributes:
        hooks: Names, as DistributedDataParallel accepts them.
        gbit: Rate of each host's link, Gbit/s.
        num_hosts: Number of hosts, with one rank each.
        batch: Number of samples of a rank in a step.
        rounds: Number of steps of each hook, in turns; times are medians over the steps, losses
            are taken after the last step.
        out: Directory for `hooks.json` and the run's logs.
    """

    hooks: tuple[str, ...] = HOOKS
    gbit: float = 1.0
    num_hosts: int = 2
    batch: int = 16
    rounds: int = 160
    out: Path = Path("runs/bench-hooks")

    def __post_init__(self) -> None:
        least = [("the number of hosts", self.num_hosts, 2), ("rounds", self.rounds, 2)]
        least += [("the batch", self.batch, 1)]
        slow = [f"the rate must be more than 0 Gbit/s, got {self.gbit:g}"] * (self.gbit <= 0)
        check_minimums(least, slow)


def _measure_hooks(bench: HooksBench, console: RichConsole) -> HooksReport:
    plan = Plan(hooks=bench.hooks, batch=bench.batch, rounds=bench.rounds)
    with (
        console.status(
            f"{bench.num_hosts} hosts at {bench.gbit:g} Gbit/s: {', '.join(bench.hooks)}"
        ),
        Lab(bench.num_hosts, bench.gbit * GBIT) as lab,
    ):
        ways = list(figures_there(lab.where(), main, plan, Way, log_dir=bench.out / "run"))
    return HooksReport(
        gbit=bench.gbit,
        hosts=bench.num_hosts,
        batch=bench.batch,
        rounds=bench.rounds,
        ways=ways,
    )


def hooks_table(report: HooksReport) -> Table:
    """Make a table with one row per hook."""
    title = (
        f"MLP of 25 million parameters, batch {report.batch} a rank, {report.hosts} hosts at "
        f"{report.gbit:g} Gbit/s, {report.place}"
    )
    heads = ("ms a step", "x", "quartiles", "first loss", f"loss after {report.rounds} steps")
    grid = new_table(title, ("hook",), heads)
    for way in report.ways:
        low, high = way.spread
        exact = way.name == EXACT
        grid.add_row(
            way.name,
            f"{way.step_s * 1e3:.0f}",
            "" if exact else f"{way.speedup:.2f}",
            "" if exact else f"{low:.2f} to {high:.2f}",
            f"{way.first_loss:.4f}",
            f"{way.last_loss:.4f}",
        )
    return grid


def hooks_verdicts(report: HooksReport) -> list[BenchVerdict]:
    """Return the verdicts on the targets for hooks."""
    exact = next(way for way in report.ways if way.name == EXACT)
    share = exact.last_loss / exact.first_loss
    learned = f"{EXACT}: loss at most {LEARNED} x the first"
    verdicts = [BenchVerdict(learned, f"measured {share:.3f}", share <= LEARNED)]
    for way in report.ways:
        least = LEAST.get(way.name.partition(":")[0])
        if least is None:
            continue
        faster = f"{way.name}: step at least {least} x"
        verdicts.append(BenchVerdict(faster, f"measured {way.speedup:.2f}", way.speedup >= least))
        ratio = way.last_loss / exact.last_loss
        as_good = f"{way.name}: loss at most {LOSS_HELD} x the loss with exact gradients"
        verdicts.append(BenchVerdict(as_good, f"measured {ratio:.3f}", ratio <= LOSS_HELD))
    return verdicts


BENCH = Benchmark("hooks", HooksBench, _measure_hooks, hooks_table, hooks_verdicts)
