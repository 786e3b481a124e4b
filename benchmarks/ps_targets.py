"""Targets of `ps`: transfers, training steps, killed servers and stragglers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.workers.ps_plan import Failover, Measured, Ratio
from benchmarks.workers.ps_stragglers import CLEAN, FREE
from benchmarks.workers.ps_training import ALL_REDUCE, SERVERS, WORKERS
from benchmarks.workers.ps_transfer import SHARED, SOCKETS
from braid.cli.bench.harness.report import BenchVerdict
from braid.cli.bench.harness.rounds import median_ratio

__all__ = ["PS_LITE_PAIRS", "failover_verdicts", "kept", "row_verdicts", "straggler_verdicts"]

PS_LITE_PAIRS = {"push": 10e6 / 0.15, "pull": 10e6 / 0.19}  # per second, in C++ over ZeroMQ
SMALL_US = 100.0
STEP_RATIO = 1.5
FAILOVER_S = 1.0
KEPT = {
    "SSP(4), transient": 0.8,
    "quorum 3, transient": 0.8,
    "quorum 3, permanent": 0.8,
    "asynchronous, permanent": 0.75,
}


class _Rate(NamedTuple):
    """Target for a rate: the claim, the least rate of each candidate, the unit, and the figure."""

    claim: str
    limits: dict[str, float]
    unit: float
    figure: str = "{rate:.2f}"


RATES = {
    "dense": _Rate(
        "dense push and pull over {way}: at least {limit:g} GB/s", {SOCKETS: 2.2, SHARED: 8.0}, 1e9
    ),
    "rows": _Rate(
        "rows over {way}: at least {limit:g} M rows/s",
        {SOCKETS: 1.0, SHARED: 1.0},
        1e6,
        "{rate:.2f}; {note}",
    ),
}
RATES |= {
    name: _Rate(
        f"{name} of pairs over {{way}}: at least {{limit:g}} x "
        f"PS-Lite's rate, {rate / 1e6:.0f} M/s",
        {SOCKETS: 1.0, SHARED: 2.0},
        rate,
        "{rate:.2f} x",
    )
    for name, rate in PS_LITE_PAIRS.items()
}


def row_verdicts(row: Measured) -> Iterator[BenchVerdict]:
    """Yield the verdicts on transfers of one kind, or on steps."""
    if row.name == "small":
        us = row.median_s(SOCKETS) * 1e6
        claim = f"a small push, until accepted: at most {SMALL_US:.0f} us"
        yield BenchVerdict(claim, f"measured {us:.0f}", us <= SMALL_US)
    elif row.name == "step":
        for way in (SERVERS, WORKERS):
            ratio = row.ratio(way, ALL_REDUCE)
            claim = f"a step where {way}: at most {STEP_RATIO:g} x a step with all-reduce"
            yield BenchVerdict(claim, f"measured {ratio:.2f} x", ratio <= STEP_RATIO)
    else:
        target = RATES[row.name]
        for way, limit in target.limits.items():
            rate = row.amount / row.median_s(way) / target.unit
            claim = target.claim.format(way=way, limit=limit)
            figure = target.figure.format(rate=rate, note=row.note)
            yield BenchVerdict(claim, f"measured {figure}", rate >= limit)


def failover_verdicts(failover: Failover) -> Iterator[BenchVerdict]:
    """Yield the verdicts on killed servers."""
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


def straggler_verdicts(ratio: Ratio) -> Iterator[BenchVerdict]:
    """Yield the verdicts on the rate that each regime keeps with a straggler."""
    for name, least in KEPT.items():
        share = kept(ratio, name)
        what = "samples" if name.startswith("asynchronous") else "clocks of BSP"
        claim = f"{name} straggler: keeps at least {least:.0%} of the {what} without one"
        yield BenchVerdict(claim, f"measured {share:.0%}", share >= least)


def kept(stragglers: Ratio, name: str) -> float:
    """Return the ratio of a regime's rate to the rate without a straggler."""
    reference = FREE if name.startswith("asynchronous") else CLEAN
    return median_ratio(stragglers.rates[name], stragglers.rates[reference])
