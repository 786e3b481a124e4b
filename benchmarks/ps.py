"""Measure a parameter server against references in the same run.

Four jobs run in sequence: transfers between one server and one worker, training steps, servers that
are killed, and stragglers (`workers.ps_transfer`, `ps_training`, `ps_failover`, `ps_stragglers`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import tyro
from rich.console import Console as RichConsole
from rich.table import Table

from benchmarks.workers.ps import main
from benchmarks.workers.ps_plan import PARTS, Failover, Measured, Plan, Ratio
from benchmarks.workers.ps_stragglers import CLEAN, FREE, NUM_WORKERS
from benchmarks.workers.ps_training import ALL_REDUCE, SERVERS, WORKERS
from benchmarks.workers.ps_transfer import RPC, SHARED, SOCKETS
from braid.cli.bench.harness.ranks import figures_of
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums, unknown
from braid.runtime.terminal_table import new_table

__all__ = ["BENCH", "PsBench", "PsReport", "ps_table", "ps_verdicts"]

T = TypeVar("T")
TRANSFERS = ("dense", "small", "pairs", "rows")
RANKS = {"step": 4, "failover": 1, "stragglers": 2 + NUM_WORKERS}
TRANSFER_RANKS = 3
ROUNDS = {"stragglers": 2}  # largest number, since each takes ten seconds

# targets
DENSE_BYTES_PER_S = {SOCKETS: 2.2e9, SHARED: 5e9}
SMALL_S = 120e-6
PS_LITE_PAIRS = {"push": 10e6 / 0.15, "pull": 10e6 / 0.19}  # per second, in C++ over ZeroMQ
PAIRS_RATIO = {SOCKETS: 1.0, SHARED: 2.0}
ROWS_PER_S = 1e6
STEP_RATIO = 1.5
FAILOVER_S = 1.0
KEPT = {
    "SSP(4), transient": 0.8,
    "quorum 3, transient": 0.8,
    "quorum 3, permanent": 0.8,
    "asynchronous, permanent": 0.75,
}
LABELS = {
    "dense": "push and pull of a dense table",
    "small": "push of 16 numbers, until accepted",
    "push": "push of pairs",
    "pull": "pull of pairs",
    "rows": "rows pulled and pushed, dim 32",
    "step": "training step, 2 workers",
}
UNITS = {"dense": ("GB/s", 1e9), "push": ("M pairs/s", 1e6), "pull": ("M pairs/s", 1e6)}
UNITS["rows"] = ("M rows/s", 1e6)


class PsReport(Report, kw_only=True):
    """Figures of all parts that were measured.

    Attributes:
        rows: Transfers and training steps.
        failover: Servers that were killed.
        stragglers: Clocks per second by regime.
    """

    rows: list[Measured] = msgspec.field(default_factory=list)
    failover: Failover | None = None
    stragglers: Ratio | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PsBench:
    """Measure a parameter server: bytes, messages, rows, steps, killed servers, stragglers.

    The references are a plain unix socket, torch's RPC, and the step with all-reduce.

    Attributes:
        only: Names of the parts to measure, out of `PARTS`.
        rounds: Number of rounds; every candidate is measured in each of them.
        kills: Number of servers to kill.
        sizes: Sizes of the measurements; its parts, rounds and kills are replaced.
        out: Directory for `ps.json` and the logs of the runs.
    """

    only: tuple[str, ...] = PARTS
    rounds: int = 8
    kills: int = 5
    sizes: Annotated[Plan, tyro.conf.Suppress] = field(default_factory=Plan)
    out: Path = Path("runs/bench-ps")

    def __post_init__(self) -> None:
        least = [("rounds", self.rounds, 1), ("kills", self.kills, 1)]
        check_minimums(least, unknown("part", self.only, PARTS))


def _measure_ps(bench: PsBench, console: RichConsole) -> PsReport:
    report = PsReport()

    def measure(parts: tuple[str, ...], kind: type[T]) -> T:
        rounds = min(bench.rounds, ROUNDS.get(parts[0], bench.rounds))
        plan = msgspec.structs.replace(bench.sizes, parts=parts, rounds=rounds, kills=bench.kills)
        ranks = RANKS.get(parts[0], TRANSFER_RANKS)
        with console.status(f"measuring {', '.join(parts)}"):
            return figures_of(
                ranks,
                main,
                plan,
                kind,
                out=bench.out,
                run=f"run-{parts[0]}",
            )

    if transfers := tuple(part for part in TRANSFERS if part in bench.only):
        report.rows += measure(transfers, list[Measured])
    if "step" in bench.only:
        report.rows += measure(("step",), list[Measured])
    if "failover" in bench.only:
        report.failover = measure(("failover",), Failover)
    if "stragglers" in bench.only:
        report.stragglers = measure(("stragglers",), Ratio)
    return report


def ps_verdicts(report: PsReport) -> list[BenchVerdict]:
    """Return the verdicts on the targets for the parameter server."""
    verdicts: list[BenchVerdict] = []
    for row in report.rows:
        verdicts += _TARGETS[row.name](row)
    if report.failover is not None:
        verdicts += _failover_verdicts(report.failover)
    if report.stragglers is not None:
        verdicts += _straggler_verdicts(report.stragglers)
    return verdicts


def _median(row: Measured, way: str) -> float:
    return statistics.median(row.seconds[way])


def _dense_verdicts(row: Measured) -> Iterator[BenchVerdict]:
    for way, least in DENSE_BYTES_PER_S.items():
        rate = row.amount / _median(row, way)
        claim = f"dense push and pull over {way}: at least {least / 1e9:g} GB/s"
        yield BenchVerdict(claim, f"measured {rate / 1e9:.2f}", rate >= least)


def _small_verdicts(row: Measured) -> Iterator[BenchVerdict]:
    seconds = _median(row, SOCKETS)
    claim = f"a small push, until accepted: at most {SMALL_S * 1e6:.0f} us"
    yield BenchVerdict(claim, f"measured {seconds * 1e6:.0f}", seconds <= SMALL_S)


def _pairs_verdicts(row: Measured) -> Iterator[BenchVerdict]:
    for way, least in PAIRS_RATIO.items():
        ratio = row.amount / _median(row, way) / PS_LITE_PAIRS[row.name]
        claim = (
            f"{row.name} of pairs over {way}: at least {least:g} x "
            f"PS-Lite's rate, {PS_LITE_PAIRS[row.name] / 1e6:.0f} M/s"
        )
        yield BenchVerdict(claim, f"measured {ratio:.2f} x", ratio >= least)


def _rows_verdicts(row: Measured) -> Iterator[BenchVerdict]:
    for way in (SOCKETS, SHARED):
        rate = row.amount / _median(row, way)
        claim = f"rows over {way}: at least {ROWS_PER_S / 1e6:g} M rows/s"
        figure = f"measured {rate / 1e6:.2f}; {row.note}"
        yield BenchVerdict(claim, figure, rate >= ROWS_PER_S)


def _step_verdicts(row: Measured) -> Iterator[BenchVerdict]:
    for way in (SERVERS, WORKERS):
        ratio = row.ratio(way, ALL_REDUCE)
        claim = f"a step where {way}: at most {STEP_RATIO:g} x a step with all-reduce"
        yield BenchVerdict(claim, f"measured {ratio:.2f} x", ratio <= STEP_RATIO)


_TARGETS = {
    "dense": _dense_verdicts,
    "small": _small_verdicts,
    "push": _pairs_verdicts,
    "pull": _pairs_verdicts,
    "rows": _rows_verdicts,
    "step": _step_verdicts,
}


def _failover_verdicts(failover: Failover) -> Iterator[BenchVerdict]:
    kills = len(failover.slowest_s)
    slowest, repaired = map(statistics.median, (failover.slowest_s, failover.repaired_s))
    claim = f"{kills} servers killed: the slowest step takes less than {FAILOVER_S:g} s"
    figure = (
        f"measured median {slowest:.3f} s, longest {max(failover.slowest_s):.3f} s (step "
        f"{failover.step_s * 1e3:.0f} ms, copies remade in {repaired:.2f} s)"
    )
    yield BenchVerdict(claim, figure, slowest < FAILOVER_S)
    held = failover.lost == 0 and failover.wrong == 0
    claim = "no acknowledged push is lost, and every pull shows all of them"
    figure = f"measured {failover.lost} lost, {failover.wrong} wrong of {failover.steps} steps"
    yield BenchVerdict(claim, figure, held)


def _straggler_verdicts(ratio: Ratio) -> Iterator[BenchVerdict]:
    for name, least in KEPT.items():
        share = _kept(ratio, name)
        what = "samples" if name.startswith("asynchronous") else "clocks of BSP"
        claim = f"{name} straggler: keeps at least {least:.0%} of the {what} without one"
        yield BenchVerdict(claim, f"measured {share:.0%}", share >= least)


def _kept(ratio: Ratio, name: str) -> float:
    reference = FREE if name.startswith("asynchronous") else CLEAN
    pairs = zip(ratio.rates[name], ratio.rates[reference], strict=True)
    return statistics.median(rate / clean for rate, clean in pairs)


class _Line(NamedTuple):
    """One line of the table."""

    what: str
    way: str
    time: str
    rate: str
    ratio: str


def ps_table(report: PsReport) -> Table:
    """Make a table with one row per act and candidate."""
    title = f"{report.place}; medians of rounds, x = time of the reference / this one's"
    grid = new_table(title, ("measured", "by"), ("ms", "rate", "x"))
    lines = [line for row in report.rows for line in _lines(row)]
    if report.failover is not None:
        failover = report.failover
        for what, seconds in (("slowest", failover.slowest_s), ("repair", failover.repaired_s)):
            time = f"{statistics.median(seconds) * 1e3:.0f}"
            lines.append(_Line("servers killed, 3 of them", f"{what}, median", time, "", ""))
    if report.stragglers is not None:
        for name, rates in report.stragglers.rates.items():
            share = _kept(report.stragglers, name)
            rate = f"{statistics.median(rates):.1f} clocks/s"
            lines.append(_Line("stragglers, 4 workers", name, "", rate, f"{share:.2f}"))
    before = ""
    for line in lines:
        grid.add_row("" if line.what == before else line.what, *line[1:])
        before = line.what
    return grid


def _lines(row: Measured) -> Iterator[_Line]:
    reference = next((way for way in (RPC, ALL_REDUCE) if way in row.seconds), "")
    for way in row.seconds:
        seconds = _median(row, way)
        unit, scale = UNITS.get(row.name, ("", 1.0))
        rate = f"{row.amount / seconds / scale:.2f} {unit}" if unit else ""
        ratio = f"{row.ratio(reference, way):.2f}" if reference else ""
        if row.name in PS_LITE_PAIRS:
            ratio = f"{row.amount / seconds / PS_LITE_PAIRS[row.name]:.2f}"
        yield _Line(LABELS[row.name], way, f"{seconds * 1e3:.3f}", rate, ratio)


def ps_lines(report: PsReport) -> list[object]:
    """Return the verdicts, and notes on the training steps."""
    notes = [
        f"steps: {row.note}; 4 processes of one thread share {report.machine}, and the "
        "all-reduce's ranks have two of them to themselves"
        for row in report.rows
        if row.name == "step"
    ]
    return [*ps_verdicts(report), *notes]


BENCH = Benchmark("ps", PsBench, _measure_ps, ps_table, ps_lines)
