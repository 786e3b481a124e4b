"""Slow workers, sometimes or always, under several regimes of consistency.

    rank 0   scheduler          ranks 2 to 5   workers, which sleep instead of computing
    rank 1   server

    transient   in a random tenth of the clocks, one worker takes 5 times as long
    permanent   one worker takes 5 times as long in every clock

Every regime has a separate table in each round, so that all workers begin at clock 0. A permanent
straggler takes a fifth of the others' steps, so that all end together; under SSP, where the others
cannot continue without it, all workers take that number of steps.

Sources: Q. Ho et al., SSP, NeurIPS 2013; J. Chen et al., Revisiting distributed synchronous SGD,
2016 (backup workers).
"""

from __future__ import annotations

import math
import random
import time
from typing import NamedTuple

import torch

from benchmarks.workers.ps_plan import Plan, Ratio
from braid import ps
from braid.comm import Group

__all__ = ["CLEAN", "FREE", "NUM_WORKERS", "REGIMES", "Regime", "straggle"]

NUM_WORKERS = 4
NUM_SERVERS = 1
SLOWER, SHARE = 5, 0.1
NUMEL = 1024
BSP, SSP = ps.BSP, ps.Consistency(staleness=4)
QUORUM = ps.Consistency(quorum=3)
ASYNCHRONOUS = ps.Consistency(staleness=math.inf)


class Regime(NamedTuple):
    """Consistency, and kind of stragglers.

    Attributes:
        name: Name in the table.
        consistency: Consistency of the table.
        stragglers: Kind of stragglers: none, transient or permanent.
    """

    name: str
    consistency: ps.Consistency
    stragglers: str


CLEAN, FREE = "BSP, no straggler", "asynchronous, no straggler"
REGIMES = (
    Regime(CLEAN, BSP, "none"),
    Regime("BSP, transient", BSP, "transient"),
    Regime("SSP(4), transient", SSP, "transient"),
    Regime("quorum 3, transient", QUORUM, "transient"),
    Regime("quorum 3, permanent", QUORUM, "permanent"),
    Regime(FREE, ASYNCHRONOUS, "none"),
    Regime("asynchronous, permanent", ASYNCHRONOUS, "permanent"),
    Regime("SSP(4), permanent", SSP, "permanent"),
)


def straggle(group: Group, plan: Plan) -> Ratio | None:
    """Measure rates; the first worker returns them."""
    workers = group.split(int(group.rank > NUM_SERVERS))
    assert workers is not None, "every rank has passed a color"
    with ps.join(group, NUM_SERVERS) as node:
        turns = [
            (
                number,
                regime,
                node.dense(f"{number} {regime.name}", torch.zeros(NUMEL), None, regime.consistency),
            )
            for number in range(plan.rounds)
            for regime in REGIMES
        ]
        if not node.is_worker:
            node.serve()
            return None
        rates: dict[str, list[float]] = {regime.name: [] for regime in REGIMES}
        for number, regime, table in turns:
            workers.barrier()
            steps = _run(table, regime, node.number, plan, seed=number)
            end = time.perf_counter()
            begin = end - steps.seconds
            answers = workers.objects.all_gather([begin, end, steps.taken])
            rates[regime.name].append(_rate(regime, answers))
    return Ratio(rates=rates) if workers.rank == 0 else None


class _Steps(NamedTuple):
    """Number of steps of one worker, and their seconds."""

    taken: int
    seconds: float


def _run(table: ps.DenseTable, regime: Regime, worker: int, plan: Plan, *, seed: int) -> _Steps:
    """Take the steps of one worker: pull, sleep, push; finally pull the result."""
    generator = random.Random(seed)
    drawn = generator.sample(range(plan.clocks), round(SHARE * plan.clocks))
    late = {clock: generator.randrange(NUM_WORKERS) for clock in drawn}
    count, is_late = plan.clocks, regime.stragglers == "permanent" and worker == NUM_WORKERS - 1
    if is_late or regime.name == "SSP(4), permanent":
        count = max(1, plan.clocks // SLOWER)
    grad = torch.ones(NUMEL)
    begin = time.perf_counter()
    for clock in range(count):
        table.pull()
        slow = is_late or (regime.stragglers == "transient" and late.get(clock) == worker)
        time.sleep(plan.clock_s * (SLOWER if slow else 1))
        table.push_async(grad)
    if not (is_late and regime.consistency is QUORUM):
        table.pull()
    return _Steps(count, time.perf_counter() - begin)


def _rate(regime: Regime, answers: list[list[float]]) -> float:
    """Return clocks per second; for asynchronous workers, steps per worker and second.

    A quorum's clocks are complete when the first worker has pulled the last one's values.
    """
    begins, ends, counts = ([answer[place] for answer in answers] for place in range(3))
    if regime.consistency is QUORUM:
        return max(counts) / (min(ends[: NUM_WORKERS - 1]) - min(begins))
    return sum(counts) / NUM_WORKERS / (max(ends) - min(begins))
