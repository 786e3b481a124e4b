"""Measure remote calls between two processes against torch's.

Ranks have glibc's own thresholds, as programs of torch's RPC have. With the thresholds that ranks
of braid get, torch's calls with large tensors take half of their time, and braid's the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import tyro
from rich.console import Console as RichConsole
from rich.table import Table

from benchmarks.workers.ps_plan import Measured
from benchmarks.workers.rpc_plan import BRAID, PARTS, TORCH, Plan
from braid.cli.bench.harness.ranks import figures_of
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums, unknown
from braid.runtime.terminal_table import add_group, new_table

__all__ = ["BENCH", "RpcBench", "RpcReport", "rpc_table", "rpc_verdicts"]

LABELS = {
    "small": "small call and its answer",
    "1 MiB": "tensor of 1 MiB, there and back",
    "16 MiB": "tensor of 16 MiB, there and back",
    "windowed": "2,000 concurrent calls",
    "autograd": "forward, backward and step over two hops",
    "serving": "a request of one of 8 observers, served in batches",
}
DEFAULTS = {"THP_MEM_ALLOC_ENABLE": "1"}  # so that the launcher sets nothing else
TARGETS = {  # speed relative to torch's
    "small": 2.0,
    "1 MiB": 2.5,
    "16 MiB": 1.5,
    "windowed": 1.5,
    "autograd": 1.5,
    "serving": 1.0,
}


class RpcReport(Report, kw_only=True):
    """Figures of all parts that were measured.

    Attributes:
        rows: Acts, by system.
    """

    rows: list[Measured] = msgspec.field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class RpcBench:
    """Measure remote calls, distributed autograd and batched serving against torch's RPC.

    Attributes:
        only: Names of the parts to measure, out of `PARTS`.
        rounds: Number of rounds; each measures both systems in new processes.
        sizes: Sizes of the measurements; its parts are replaced.
        out: Directory for `rpc.json` and the log of the run.
    """

    only: tuple[str, ...] = PARTS
    rounds: int = 8
    sizes: Annotated[Plan, tyro.conf.Suppress] = field(default_factory=Plan)
    out: Path = Path("runs/bench-rpc")

    def __post_init__(self) -> None:
        least = [("rounds", self.rounds, 1)]
        check_minimums(least, unknown("part", self.only, PARTS))


def _measure_rpc(bench: RpcBench, console: RichConsole) -> RpcReport:
    report = RpcReport()

    from benchmarks.workers.rpc import main  # torch's RPC warns when it is imported

    plan = msgspec.structs.replace(bench.sizes, parts=bench.only)
    for number in range(bench.rounds):
        with console.status(f"round {number + 1} of {bench.rounds}: {', '.join(bench.only)}"):
            rows = figures_of(2, main, plan, list[Measured], out=bench.out, environ=DEFAULTS)
        if not number:
            report.rows = rows
            continue
        for all_rounds, row in zip(report.rows, rows, strict=True):
            for system, seconds in row.seconds.items():
                all_rounds.seconds[system] += seconds
    return report


def rpc_verdicts(report: RpcReport) -> Iterator[BenchVerdict]:
    """Yield the verdicts on the targets for calls."""
    for row in report.rows:
        if TORCH in row.seconds:
            least, ratio = TARGETS[row.name], row.ratio(TORCH, BRAID)
            claim = f"{LABELS[row.name]}: at least {least:g} times as fast as torch's RPC"
            yield BenchVerdict(claim, f"measured {ratio:.2f}", ratio >= least)


def rpc_table(report: RpcReport) -> Table:
    """Make a table with one row per act and system."""
    title = f"{report.place}; medians of rounds, x = time of torch's / this one's"
    grid = new_table(title, ("measured", "by"), ("us", "GB/s", "x"))
    for row in report.rows:
        add_group(grid, LABELS[row.name], _cells(row))
    return grid


def _cells(row: Measured) -> Iterator[tuple[str, ...]]:
    for system in row.seconds:
        seconds = row.median_s(system)
        rate = f"{row.amount / seconds / 1e9:.2f}" if row.amount > 1 else ""
        has_ratio = system == BRAID and TORCH in row.seconds
        ratio = f"{row.ratio(TORCH, BRAID):.2f}" if has_ratio else ""
        yield system, f"{seconds * 1e6:,.0f}", rate, ratio


BENCH = Benchmark("rpc", RpcBench, _measure_rpc, rpc_table, rpc_verdicts)
