"""One rank of `model`: messages and algorithms, timed in turns.

The cost model never gets the times of algorithms. It gets the times of messages, of a barrier, and
of copies and additions in memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import torch

from braid.cli.bench.harness.turns import in_turns
from braid.cli.bench.workers.probe import (
    LONG_BYTES,
    REST_S,
    Probed,
    measured,
    message_runs,
    rested_of,
    stand,
)
from braid.comm import Group
from braid.comm.engines.selection import STEP_BYTES, PrimitiveCosts, predicted_s
from braid.context import init, shutdown
from braid.errors import ConfigError

__all__ = ["AlgorithmTime", "MemoryFigures", "NetworkFigures", "Plan", "main"]

MEMORY_TURNS = 4  # for each turn over a network, because they are short
MEMORY_ALGORITHMS = (  # the engine chooses among these in shared memory
    ("all_reduce", "direct"),
    ("all_reduce", "two_phase"),
    ("all_reduce", "pulled"),
    ("broadcast", "staged"),
    ("broadcast", "pulled"),
    ("all_gather", "staged"),
    ("all_gather", "pulled"),
    ("reduce_scatter", "staged"),
    ("reduce_scatter", "pulled"),
    ("all_to_all", "staged"),
    ("all_to_all", "pulled"),
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements to make.

    Attributes:
        algorithms: Pairs (operation, algorithm). If empty, the algorithms among which the engine
            chooses in shared memory.
        sizes_bytes: Bytes of the largest full buffer of a rank.
        message_bytes: Sizes of messages.
        turns: Number of turns through all measurements.
    """

    algorithms: tuple[tuple[str, str], ...]
    sizes_bytes: tuple[int, ...]
    message_bytes: tuple[int, ...]
    turns: int


class AlgorithmTime(msgspec.Struct, kw_only=True):
    """Time of an algorithm: median seconds, and first and third quartile."""

    operation: str
    algorithm: str
    nbytes: int
    seconds: float
    spread: tuple[float, float]


class NetworkFigures(msgspec.Struct, kw_only=True):
    """Figures of ranks on a network.

    Attributes:
        ranks: World size.
        probed: Costs of messages.
        step_s: Seconds of an all-reduce of a few bytes, in which every rank sends to every other
            rank: the cost of a step without its bytes.
        copy_s_per_byte: Seconds of a copy in memory, per byte.
        add_s_per_byte: Seconds of an addition in memory, per byte.
        times: Times of algorithms.
    """

    ranks: int
    probed: Probed
    step_s: float
    copy_s_per_byte: float
    add_s_per_byte: float
    times: list[AlgorithmTime]


class MemoryFigures(msgspec.Struct, kw_only=True):
    """Figures of ranks that share memory: times of algorithms and the selection's predictions."""

    ranks: int
    costs: PrimitiveCosts
    times: list[AlgorithmTime]
    predicted_s: list[float]


def main(plan: Plan) -> Iterator[MemoryFigures | NetworkFigures]:
    """Measure; rank 0 yields the figures."""
    group = init()
    figures = _in_memory(group, plan) if not plan.algorithms else _over_network(group, plan)
    if group.rank == 0:
        yield figures
    shutdown()


def _over_network(group: Group, plan: Plan) -> NetworkFigures:
    levels = stand(group, pin=False)
    runs = message_runs(group, levels, plan.message_bytes)
    names = [(*pair, n) for pair in plan.algorithms for n in plan.sizes_bytes]
    for operation, name, nbytes in names:
        runs[f"{operation} {name} {nbytes}"] = run_of(group, operation, name, nbytes)
    a, b = torch.ones(1 << 18), torch.ones(1 << 18)
    runs["copy"], runs["add"] = partial(a.copy_, b), partial(torch.add, a, b, out=a)
    little = torch.zeros(STEP_BYTES // 4)
    runs["step"] = partial(group.all_reduce, little, algorithm="direct")
    rested = rested_of(levels, plan.message_bytes)
    rested += [f"{operation} {name} {n}" for operation, name, n in names if n > LONG_BYTES]
    times = in_turns(group, runs, plan.turns, rest_s=REST_S, rested=rested)
    per_byte = {name: statistics.median(times[name]) / (a.numel() * 4) for name in ("copy", "add")}
    return NetworkFigures(
        ranks=group.size,
        probed=measured(levels, plan.message_bytes, times),
        step_s=statistics.median(times["step"]),
        copy_s_per_byte=per_byte["copy"],
        add_s_per_byte=per_byte["add"],
        times=[_time_of(*name, times[f"{name[0]} {name[1]} {name[2]}"]) for name in names],
    )


def _in_memory(group: Group, plan: Plan) -> MemoryFigures:
    """Time algorithms in shared memory; costs are measured again before every turn.

    The best turn of times and costs is used: these operations are shorter than an interruption of a
    rank by another program, so that on a busy machine medians would show the interruptions.
    """
    able = group.engine.capabilities.algorithms
    names = [(*pair, n) for pair in MEMORY_ALGORITHMS if pair[1] in able for n in plan.sizes_bytes]
    runs = {" ".join(map(str, name)): run_of(group, *name) for name in names}
    times: dict[str, list[float]] = {name: [] for name in runs}
    predicted: dict[str, list[float]] = {name: [] for name in runs}
    costs = _costs(group)
    for _ in range(MEMORY_TURNS * plan.turns):
        group.engine.tune(60.0)
        costs = _costs(group)
        for name, every in in_turns(group, runs, 1).items():
            operation, algorithm, nbytes = name.split()
            times[name] += every
            predicted[name].append(
                predicted_s(operation, algorithm, int(nbytes), group.size, costs)
            )
    return MemoryFigures(
        ranks=group.size,
        costs=costs,
        times=[_time_of(*name, times[" ".join(map(str, name))], min) for name in names],
        predicted_s=[min(every) for every in predicted.values()],
    )


def _costs(group: Group) -> PrimitiveCosts:
    selection = getattr(group.engine, "selection", None)
    if selection is None:
        msg = (
            f"this model measures shared memory, but the group runs on engine {group.engine!r}: "
            "run it on ranks of one host"
        )
        raise ConfigError(msg)
    costs: PrimitiveCosts = selection.costs
    return costs


def run_of(group: Group, operation: str, name: str, nbytes: int) -> Callable[[], object]:
    """Return a function that runs an operation by a named algorithm on l = `nbytes`."""
    n = group.size
    numel = max(n, nbytes // 4 // n * n)
    x, out = torch.zeros(numel), torch.zeros(numel)
    part, small = x[: numel // n], out[: numel // n]
    known: dict[str, Callable[[], object]] = {
        "all_reduce": partial(group.all_reduce, x, algorithm=name),
        "broadcast": partial(group.broadcast, x, 0, algorithm=name),
        "all_gather": partial(group.all_gather, part, out=out, algorithm=name),
        "reduce_scatter": partial(group.reduce_scatter, x, out=small, algorithm=name),
        "all_to_all": partial(group.all_to_all, x, out=out, algorithm=name),
    }
    return known[operation]


def _time_of(
    operation: str,
    algorithm: str,
    nbytes: int,
    times: list[float],
    of: Callable[[list[float]], float] = statistics.median,
) -> AlgorithmTime:
    low, high = min(times), max(times)
    if len(times) > 1:
        low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return AlgorithmTime(
        operation=operation,
        algorithm=algorithm,
        nbytes=nbytes,
        seconds=of(times),
        spread=(low, high),
    )
