"""Measure the time from the command to the first step, and until survivors notice a death.

The same job is started by `braid run` on this host and by an engine, in turns. In the second part
of a round a rank is killed; the time ends when the last survivor notices it.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro
from rich.console import Console as RichConsole
from rich.table import Table

from braid.cli.bench.harness.options import Ranks
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums
from braid.errors import ConfigError
from braid.launch import JobSpec, Outcome, QuietConsole, Supervisor
from braid.launch.engines.client import EngineSupervisor
from braid.launch.engines.options import EngineOptions
from braid.runtime.terminal_table import new_table

__all__ = ["BENCH", "LaunchBench", "LaunchReport", "launch_verdicts"]

WORKER = "benchmarks.workers.launch"
HERE = "braid run"
MOST_TIMES, MOST_S = 1.3, 1.0


class Launched(msgspec.Struct):
    """Seconds of one launcher, by round."""

    start_s: list[float] = msgspec.field(default_factory=list)
    notice_s: list[float] = msgspec.field(default_factory=list)


class LaunchReport(Report, kw_only=True):
    """Figures of all launchers.

    Attributes:
        ranks: World size.
        launchers: Figures, by name of the launcher.
    """

    ranks: int
    launchers: dict[str, Launched]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchBench:
    """Measure launchers: time to the first step, and time until survivors notice a death.

    Attributes:
        engines: Engines with a running cluster to compare with `braid run`: ray, slurm, mpi.
        ranks: World size.
        rounds: Number of rounds.
        out: Directory for `launch.json` and the runs' logs.
    """

    engines: Annotated[tuple[str, ...], tyro.conf.arg(name="on")] = ()
    ranks: Ranks = 8
    rounds: int = 3
    out: Path = Path("runs/bench-launch")

    def __post_init__(self) -> None:
        check_minimums([("ranks", self.ranks, 2), ("rounds", self.rounds, 1)])


def _measure_launch(bench: LaunchBench, console: RichConsole) -> LaunchReport:
    report = LaunchReport(ranks=bench.ranks, launchers={})
    names = [HERE, *bench.engines]
    with console.status(f"starting jobs: {', '.join(names)}"):
        for turn in range(bench.rounds + 1):
            for name in names if turn % 2 else reversed(names):
                figures = report.launchers.setdefault(name, Launched())
                start_s, notice_s = _once(bench, name)
                if turn:  # the first turn is a warm-up
                    figures.start_s.append(start_s)
                    figures.notice_s.append(notice_s)
    bench.out.mkdir(parents=True, exist_ok=True)
    return report


def launch_verdicts(report: LaunchReport) -> list[BenchVerdict]:
    """Return the verdicts on the targets for engines."""
    verdicts = []
    here_s = statistics.median(report.launchers[HERE].start_s)
    for name, figures in report.launchers.items():
        times = statistics.median(figures.start_s) / here_s
        slowest_s = max(figures.notice_s)
        if name != HERE:
            claim = f"{name}: from start to first step within {MOST_TIMES} times braid run"
            verdicts.append(BenchVerdict(claim, f"measured {times:.2f}", times <= MOST_TIMES))
        claim = f"{name}: survivors know of a death within {MOST_S:g} s"
        verdicts.append(BenchVerdict(claim, f"measured {slowest_s:.2f} s", slowest_s <= MOST_S))
    return verdicts


def launch_table(report: LaunchReport) -> Table:
    """Make a table with one row per launcher."""
    table = new_table(
        f"{report.ranks} ranks, {report.machine}", ["launcher"], ["first step, s", "death known, s"]
    )
    for name, figures in report.launchers.items():
        table.add_row(
            name,
            f"{statistics.median(figures.start_s):.2f}",
            f"{statistics.median(figures.notice_s):.3f}",
        )
    return table


def _once(bench: LaunchBench, name: str) -> tuple[float, float]:
    """Run two jobs; return the seconds to the first step, and until survivors notice a death."""
    began_s = time.time()
    outcome, lines = _run(bench, name, "step")
    if not outcome.ok:
        raise ConfigError(str(outcome))
    first_s = max(line["first_step"] for line in lines if "first_step" in line) - began_s
    outcome, lines = _run(bench, name, "kill")
    killed = [line["killed"] for line in lines if "killed" in line]
    noticed = [line["noticed"] for line in lines if "noticed" in line]
    if not killed or len(noticed) != bench.ranks - 1:
        raise ConfigError(str(outcome))
    return first_s, max(noticed) - killed[0]


def _run(bench: LaunchBench, name: str, what: str) -> tuple[Outcome, list[dict[str, float]]]:
    console = QuietConsole()
    job = JobSpec(
        command=(WORKER, what),
        kind="module",
        num_ranks=bench.ranks,
        threads=1,
        log_dir=str(bench.out / "run"),
        hang_report_s=0.0,
    )
    if name == HERE:
        outcome = Supervisor(console).run(job)
    else:
        where = EngineOptions(engine=name, num_ranks=bench.ranks)
        outcome = EngineSupervisor(console).run_on(job, where)
    lines = [text for _, stream, text in console.lines if stream == 1 and text.startswith(b"{")]
    return outcome, [json.loads(text) for text in lines]


BENCH = Benchmark("launch", LaunchBench, _measure_launch, launch_table, launch_verdicts)
