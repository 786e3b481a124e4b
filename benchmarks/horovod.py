"""Compare Horovod's engine on braid with Gloo and with braid's DDP.

Figures that need ranks are measured on ranks (`workers.horovod`). The state machine also runs as a
thousand ranks in one process, which compares the first rank's work in steady state with the other
ranks' work.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from rich.console import Console as RichConsole
from rich.table import Table

from benchmarks.workers.horovod import Exchange, Figures, Plan, Small, Step, main
from braid.cli.bench.harness.options import Budget, Ranks, in_fields
from braid.cli.bench.harness.ranks import figures_of
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums, unknown
from braid.cli.bench.workers.ddp import Case
from braid.cli.bench.workers.ddp_models import MODEL_NAMES
from braid.compat.horovod.fusion import FusionState, Request
from braid.runtime.terminal_table import new_table

__all__ = [
    "BENCH",
    "FusionBench",
    "FusionReport",
    "Thousand",
    "fusion_table",
    "fusion_verdicts",
]

CASES = (Case("mlp", 64), Case("gpt", 2), Case("tiny", 32))
LEAST_SPEEDUP = 1.5
LONG_STEP_S, MOST_LONGER, MOST_LONGER_SHORT = 0.05, 0.10, 0.25
MOST_EXCHANGE_S, MOST_STATE_S = 200e-6, 30e-6
MOST_UNEVEN = 1.5
NUM_RANKS, NUM_TENSORS, NUM_CYCLES = 1000, 50, 12


class Thousand(msgspec.Struct, kw_only=True):
    """Steady state of many ranks in one process.

    Attributes:
        ranks: Number of ranks.
        first_s: Median seconds of the first rank in a cycle. Only the first rank runs some lines of
            code, which are then not in the caches.
        median_s: Seconds of the median rank in a cycle.
        first_calls: Number of function calls of the first rank in a cycle.
        most_calls: Largest number of function calls of another rank in a cycle.
        lists: Number of cycles, after the first, in which ranks had to exchange lists.
    """

    ranks: int
    first_s: float
    median_s: float
    first_calls: int
    most_calls: int
    lists: int


class FusionReport(Report, kw_only=True):
    """Figures of the negotiated engine."""

    ranks: int
    small: Small
    steps: list[Step]
    exchanges: list[Exchange]
    thousand: Thousand


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionBench:
    """Measure Horovod's engine on braid against Gloo and braid's DDP.

    Attributes:
        ranks: World size.
        cases: Models with the batch of a rank: mlp and gpt (25 million parameters), conv, and tiny
            (a step of some milliseconds).
        rounds: Number of rounds of each case.
        budget_s: Approximate seconds for a case.
        out: Directory for `fusion.json` and the run's logs.
    """

    ranks: Ranks = 2
    cases: tuple[Annotated[Case, in_fields(Case)], ...] = CASES
    rounds: int = 60
    budget_s: Budget = 30.0
    out: Path = Path("runs/bench-horovod")

    def __post_init__(self) -> None:
        models = (case.model for case in self.cases)
        problems = unknown("model", models, sorted({*MODEL_NAMES, "tiny"}))
        least = [("ranks", self.ranks, 2), ("rounds", self.rounds, 2)]
        least += [(f"the batch of {case.model}", case.batch, 1) for case in self.cases]
        check_minimums(least, problems)


def _measure_fusion(bench: FusionBench, console: RichConsole) -> FusionReport:
    plan = Plan(cases=bench.cases, rounds=bench.rounds, budget_s=bench.budget_s)

    with console.status(f"small tensors, steps and exchanges on {bench.ranks} ranks"):
        figures = figures_of(bench.ranks, main, plan, Figures, out=bench.out)
    with console.status(f"{NUM_RANKS} ranks in one process"):
        thousand = many_ranks(NUM_RANKS, NUM_TENSORS, NUM_CYCLES)
    return FusionReport(
        ranks=bench.ranks,
        small=figures.small,
        steps=figures.steps,
        exchanges=figures.exchanges,
        thousand=thousand,
    )


def many_ranks(size: int, num_tensors: int, num_cycles: int) -> Thousand:
    """Run the state machines of `size` ranks through cycles of the same tensors."""
    machines = [FusionState(rank, range(size)) for rank in range(size)]
    requests = [
        Request(f"x{n}", "all_reduce", "float32", (256,), 4, "sum") for n in range(num_tensors)
    ]
    times: list[list[float]] = [[] for _ in machines]
    calls = [0] * size
    lists = 0
    for cycle in range(num_cycles + 1):
        count = _timed if cycle < num_cycles else _count_calls
        for state in machines:
            for request in requests:
                state.submit(request, 0.0)
        bits, spent = [], []
        for state in machines:
            seconds, number, bitmask = count(partial(state.open, 0.0))
            bits.append(bitmask)
            spent.append((seconds, number))
        together = int.from_bytes(bits[0], "little")
        for bitmask in bits:
            together &= int.from_bytes(bitmask, "little")
        combined = together.to_bytes(len(bits[0]), "little")
        asked = False
        for rank, state in enumerate(machines):
            seconds, number, asked = count(partial(_ended, state, combined))
            if cycle < num_cycles:
                times[rank].append(spent[rank][0] + seconds)
            calls[rank] = spent[rank][1] + number
        if asked:
            lists += cycle > 0
            answer = machines[0].answer([state.own_list(0.0) for state in machines], 0.0)
            for state in machines:
                state.conclude(answer)
    steady = [statistics.median(times[1:]) for times in times]
    return Thousand(
        ranks=size,
        first_s=steady[0],
        median_s=statistics.median(steady),
        first_calls=calls[0],
        most_calls=max(calls[1:]),
        lists=lists,
    )


X = TypeVar("X")


def _ended(state: FusionState, combined: bytes) -> bool:
    asked = state.combined(combined)
    if not asked:
        state.conclude(None)
    return asked


def _timed(call: Callable[[], X]) -> tuple[float, int, X]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, 0, result


def _count_calls(call: Callable[[], X]) -> tuple[float, int, X]:
    """Count the calls of Python and C functions that `call` makes."""
    number = 0

    def on_event(_frame: object, event: str, _argument: object) -> None:
        nonlocal number
        number += event in {"call", "c_call"}

    sys.setprofile(on_event)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return 0.0, number, result


def fusion_verdicts(report: FusionReport) -> list[BenchVerdict]:
    """Return the verdicts on the targets for the engine."""
    held: list[tuple[str, bool, str]] = [
        (
            f"200 small tensors at least {LEAST_SPEEDUP} x one all-reduce each through Gloo",
            report.small.speedup >= LEAST_SPEEDUP,
            f"{report.small.speedup:.1f}",
        )
    ]
    for step in report.steps:
        long = step.seconds["ddp"] >= LONG_STEP_S
        most = MOST_LONGER if long else MOST_LONGER_SHORT
        what = f"{step.model}, batch {step.batch}: step at most {most:.0%} longer than with our DDP"
        held.append((what, step.longer <= most, f"{step.longer:.1%}"))
    for exchange in report.exchanges:
        what = f"exchange of {exchange.tensors} tensors at most {MOST_EXCHANGE_S * 1e6:.0f} us"
        held.append((what, exchange.seconds <= MOST_EXCHANGE_S, f"{exchange.seconds * 1e6:.0f} us"))
        what = f"its pure part at most {MOST_STATE_S * 1e6:.0f} us"
        held.append((what, exchange.state_s <= MOST_STATE_S, f"{exchange.state_s * 1e6:.0f} us"))
    many = report.thousand
    share = many.first_calls / many.most_calls
    what = (
        f"{many.ranks} ranks in steady state: the first needs at most {MOST_UNEVEN} times the "
        "calls of others"
    )
    even = share <= MOST_UNEVEN and not many.lists
    held.append(
        (
            what,
            even,
            f"{share:.2f} times ({many.first_calls} calls), and it is asked {many.lists} times",
        )
    )
    return [BenchVerdict(what, f"measured {figure}", ok) for what, ok, figure in held]


def fusion_table(report: FusionReport) -> Table:
    """Make a table with one row per measurement."""
    title = f"{report.machine}, torch {report.torch}, {report.ranks} ranks; medians"
    grid = new_table(title, ("what",), ("ms", "ratio", "quartiles"))
    small = report.small
    for way, seconds in small.seconds.items():
        ratio = f"{small.speedup:.1f} x" if way == "engine" else ""
        between = f"{small.between[0]:.1f} to {small.between[1]:.1f}" if ratio else ""
        grid.add_row(f"200 tensors of 1 KiB, {way}", f"{seconds * 1e3:.2f}", ratio, between)
    for step in report.steps:
        what = f"{step.model}, batch {step.batch}"
        grid.add_row(f"{what}: our DDP", f"{step.seconds['ddp'] * 1e3:.1f}", "", "")
        grid.add_row(
            f"{what}: Horovod's optimizer",
            f"{step.seconds['horovod'] * 1e3:.1f}",
            f"{step.longer:+.1%}",
            f"{step.between[0]:+.1%} to {step.between[1]:+.1%}",
        )
    for exchange in report.exchanges:
        what = f"exchange in steady state, {exchange.tensors} tensors"
        grid.add_row(
            what, f"{exchange.seconds * 1e3:.3f}", f"{exchange.state_s * 1e6:.0f} us pure", ""
        )
    many = report.thousand
    grid.add_row(
        f"first of {many.ranks} ranks, {NUM_TENSORS} tensors",
        f"{many.first_s * 1e3:.3f}",
        f"{many.first_s / many.median_s:.2f} x median",
        "",
    )
    return grid


BENCH = Benchmark("fusion", FusionBench, _measure_fusion, fusion_table, fusion_verdicts)
