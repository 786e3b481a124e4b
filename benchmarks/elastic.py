"""Measure an elastic training while its ranks are killed: recovery time and sample rate.

A recovery lasts from a kill to the end of the next step that survivors take without the rank. The
rate of samples is compared with an undisturbed run, in turns. On a host with fewer cores than ranks
the remaining ranks use all cores; so the rate shows the cost of recoveries and of new ranks.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from statistics import median, quantiles
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.workers import elastic as worker
from braid.cli.bench.harness.options import Ranks
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums
from braid.runtime.option_types import Interval
from braid.runtime.terminal_table import new_table

__all__ = ["BENCH", "ElasticBench", "ElasticReport"]

MOST_MEDIAN_S = {"whole models": 0.5, "shards": 1.5, "a mesh with spares": 3.0, "a mesh": 6.0}
MOST_P95_S = 1.5  # of whole models
LEAST_SHARE = 0.98
MOST_OF_COPIES = 0.03  # of a step


class _Run(msgspec.Struct):
    """One run.

    Attributes:
        seconds: Seconds from the first to the last step.
        step_s: Median seconds of a step.
        recoveries_s: Seconds of each recovery.
        digests: Digests of the weights of the ranks at the end.
    """

    seconds: float
    step_s: float
    recoveries_s: list[float]
    digests: list[str]


class ElasticReport(Report, kw_only=True):
    """Runs without and with kills, in turns.

    Attributes:
        steps: Number of steps of each run.
        kind: What the ranks have, a key of `MOST_MEDIAN_S`.
        undisturbed: Runs without kills.
        without_copies: Runs on a mesh without kills and without copies.
        killed: Runs with kills.
    """

    steps: int = 0
    kind: str = "whole models"
    without_copies: list[_Run] = msgspec.field(default_factory=list)
    undisturbed: list[_Run] = msgspec.field(default_factory=list)
    killed: list[_Run] = msgspec.field(default_factory=list)

    @property
    def recoveries_s(self) -> list[float]:
        """Seconds of all recoveries."""
        return [seconds for run in self.killed for seconds in run.recoveries_s]


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticBench:
    """Measure an elastic training of 25 million parameters while its ranks are killed.

    Attributes:
        ranks: Number of ranks.
        steps: Number of steps of a run.
        rounds: Number of pairs of runs.
        every_s: Time between two kills, such as 20s.
        spares: Number of spare ranks.
        restarts: Number of new ranks that may replace lost ones.
        mesh: Mesh of a divided model, such as `dp=3` or `pp=2,dp=2`; a whole model on each rank if
            empty.
        shard: Stage of sharding on the mesh.
        model: Three linear layers (mlp), or a GPT with sequences of 128 bytes (gpt).
        samples: Number of samples of a micro-batch.
        out: Directory for `elastic.json`.
    """

    ranks: Ranks = 3
    steps: int = 300
    rounds: int = 2
    every_s: Interval = 20.0
    spares: int = 0
    restarts: int = 1000
    mesh: str = ""
    shard: int = 0
    model: Literal["mlp", "gpt"] = "mlp"
    samples: int = 4
    out: Path = Path("runs/bench-elastic")

    def __post_init__(self) -> None:
        check_minimums([("ranks", self.ranks, 2), ("steps", self.steps, 10)])
        check_minimums([("rounds", self.rounds, 1), ("samples", self.samples, 1)])


def _run(bench: ElasticBench, seed: int, *, kills: bool = False, copies: bool = True) -> _Run:
    """Run the training once, and kill a member every few seconds."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="braid-bench-") as directory:
        out = Path(directory)
        limits = [f"--restarts={bench.restarts}", f"--spares={bench.spares}", "--min-ranks=1"]
        command = [
            sys.executable, "-m", "braid", "run", "-n", str(bench.ranks), *limits, "--threads", "1",
            "--log-dir", str(out / "run"), str(worker.__file__), str(out), str(bench.steps),
            str(bench.ranks), str(bench.samples), bench.model,
        ]  # fmt: skip
        command += [bench.mesh, str(bench.shard), str(int(copies))] if bench.mesh else []
        kills_ns: list[int] = []
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while kills and process.poll() is None:
                time.sleep(bench.every_s)
                members = _members(out)
                if len(members) > 1 and process.poll() is None:
                    kills_ns.append(time.monotonic_ns())
                    os.kill(rng.choice(members), signal.SIGKILL)
        steps = [_steps(path) for path in out.glob("*.steps")]
        ends_ns = [ns for rows in steps for _, ns, _ in rows]
        return _Run(
            seconds=(max(ends_ns) - min(ends_ns)) / 1e9,
            step_s=median(b[1] - a[1] for rows in steps for a, b in pairwise(rows)) / 1e9,
            recoveries_s=[
                seconds
                for ns in kills_ns
                if ns < max(ends_ns) and isfinite(seconds := _recovery_s(ns, steps))
            ],
            digests=[path.read_text() for path in out.glob("*.digest")],
        )


def _members(out: Path) -> list[int]:
    """Return the ids of the processes that are training."""
    pids = [int(path.read_text().split()[0]) for path in out.glob("*.steps") if path.stat().st_size]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def _steps(path: Path) -> list[tuple[int, int, int]]:
    """Return the number of member changes, the end time and the number of each step of a rank."""
    rows = [tuple(map(int, line.split())) for line in path.read_text().splitlines()[1:]]
    return [(row[0], row[1], row[2]) for row in rows]


def _recovery_s(kill_ns: int, steps: list[list[tuple[int, int, int]]]) -> float:
    """Return the seconds from a kill to the end of the first step with new members."""
    ends = []
    for rows in steps:
        before = [changes for changes, ns, _ in rows if ns <= kill_ns]
        if before:
            ends += [ns for changes, ns, _ in rows if ns > kill_ns and changes > before[-1]][:1]
    return (min(ends) - kill_ns) / 1e9 if ends else nan


def _measure(bench: ElasticBench, console: Console) -> ElasticReport:
    report = ElasticReport(steps=bench.steps, kind=_kind(bench))
    for number in range(bench.rounds):
        with console.status(f"round {number + 1} of {bench.rounds}"):
            report.undisturbed.append(_run(bench, number))
            if bench.mesh:
                report.without_copies.append(_run(bench, number, copies=False))
            report.killed.append(_run(bench, number, kills=True))
    return report


def _kind(bench: ElasticBench) -> str:
    """Return what the ranks have, a key of `MOST_MEDIAN_S`."""
    if not bench.mesh:
        return "whole models"
    if bench.shard:
        return "shards"
    return "a mesh with spares" if bench.spares else "a mesh"


def _share(report: ElasticReport) -> float:
    """Return the remaining fraction of the undisturbed rate."""
    pairs = zip(report.undisturbed, report.killed, strict=True)
    return median(alone.seconds / killed.seconds for alone, killed in pairs)


def _table(report: ElasticReport) -> Table:
    titles = ("seconds", "step, ms", "kills", "median recovery", "longest")
    grid = new_table(report.place, ("run",), titles)
    runs_of = {
        "undisturbed": report.undisturbed,
        "without copies": report.without_copies,
        "killed": report.killed,
    }
    for kind, runs in runs_of.items():
        for number, run in enumerate(runs, 1):
            times = [f"{f(run.recoveries_s):.2f} s" for f in (median, max) if run.recoveries_s]
            row = (f"{run.seconds:.1f}", f"{1e3 * run.step_s:.0f}", str(len(run.recoveries_s)))
            grid.add_row(f"{kind} {number}", *row, *times)
    return grid


def _verdicts(report: ElasticReport) -> Iterator[BenchVerdict]:
    times = report.recoveries_s or [nan]
    middle, most_s = median(times), MOST_MEDIAN_S[report.kind]
    claim = f"{report.kind}: median from a kill to the next step at most {most_s:g} s"
    yield BenchVerdict(claim, f"measured {middle:.2f} s of {len(times)}", middle <= most_s)
    if report.kind == "whole models":
        # inclusive, since the other method exceeds the longest of a few
        p95 = quantiles(times, n=20, method="inclusive")[-1] if len(times) > 1 else times[0]
        claim = f"95 % of them at most {MOST_P95_S:g} s"
        yield BenchVerdict(claim, f"measured {p95:.2f} s", p95 <= MOST_P95_S)
    if report.without_copies:
        claim = f"copies cost at most {MOST_OF_COPIES:.0%} of a step"
        pairs = zip(report.undisturbed, report.without_copies, strict=True)
        share = median(one.step_s / without.step_s for one, without in pairs) - 1
        yield BenchVerdict(claim, f"measured {share:.1%}", share <= MOST_OF_COPIES)
    claim = f"at least {LEAST_SHARE:.0%} of the undisturbed rate is left"
    yield BenchVerdict(claim, f"measured {_share(report):.0%}", _share(report) >= LEAST_SHARE)
    runs = report.undisturbed + report.without_copies + report.killed
    digests = {digest for run in runs for digest in run.digests}
    yield BenchVerdict("all runs end with the same bits", f"{len(digests)}", len(digests) == 1)


BENCH = Benchmark("elastic", ElasticBench, _measure, _table, _verdicts)
