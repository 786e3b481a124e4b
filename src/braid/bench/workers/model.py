"""One rank of `braid bench net --model`: messages and algorithms, timed in turns.

The cost model never sees the times of algorithms; it sees those of messages, of a barrier, and of
copies and additions in memory.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial

import msgspec
import torch

from braid.bench.harness.turns import in_turns
from braid.bench.workers.probe import (
    LONG_BYTES,
    REST_S,
    Probed,
    measured,
    message_runs,
    rested_of,
    stand,
)
from braid.comm import Group
from braid.comm.engines.selection import STEP_BYTES, Costs, predicted_s
from braid.context import init, shutdown
from braid.errors import ConfigError

__all__ = ["Found", "Near", "Plan", "Taken", "main"]

NEAR_TURNS = 4  # for each over a network: they are short
NEAR_ALGORITHMS = (  # of ranks that share memory: those that the engine chooses between
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
    """What to measure.

    Attributes:
        algorithms: (operation, algorithm) by name; those that the engine chooses between where all
            share memory when empty.
        sizes_bytes: Bytes of the largest full buffer of a rank.
        message_bytes: Sizes of messages.
        turns: Through everything.
    """

    algorithms: tuple[tuple[str, str], ...]
    sizes_bytes: tuple[int, ...]
    message_bytes: tuple[int, ...]
    turns: int


class Taken(msgspec.Struct, kw_only=True):
    """What an algorithm took: median seconds, and first and third quartile."""

    operation: str
    algorithm: str
    nbytes: int
    seconds: float
    spread: tuple[float, float]


class Found(msgspec.Struct, kw_only=True):
    """Over a network.

    Attributes:
        ranks: World size.
        probed: What messages cost.
        step_s: An all-reduce of next to nothing, in which every rank sends to every other: what a
            step costs beside its bytes.
        copy_s_per_byte: In memory.
        add_s_per_byte: In memory.
        taken: What algorithms took.
    """

    ranks: int
    probed: Probed
    step_s: float
    copy_s_per_byte: float
    add_s_per_byte: float
    taken: list[Taken]


class Near(msgspec.Struct, kw_only=True):
    """Measure algorithms in shared memory, each beside the selection's own prediction."""

    ranks: int
    costs: Costs
    taken: list[Taken]
    predicted_s: list[float]


def main(plan: Plan) -> None:
    """Measure; rank 0 prints the figures."""
    torch.set_num_threads(1)
    group = init()
    found = _near(group, plan) if not plan.algorithms else _far(group, plan)
    if group.rank == 0:
        print(msgspec.json.encode(found).decode(), flush=True)
    shutdown()


def _far(group: Group, plan: Plan) -> Found:
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
    return Found(
        ranks=group.size,
        probed=measured(levels, plan.message_bytes, times),
        step_s=statistics.median(times["step"]),
        copy_s_per_byte=per_byte["copy"],
        add_s_per_byte=per_byte["add"],
        taken=[_taken(*name, times[f"{name[0]} {name[1]} {name[2]}"]) for name in names],
    )


def _near(group: Group, plan: Plan) -> Near:
    """Costs are measured anew before every turn, as the engine measures them when it begins.

    What counts is the best turn of either: these operations take less than the time for which a
    rank loses its core to somebody else, so on a machine that others use, too, medians would tell
    of them.
    """
    able = group.engine.capabilities.algorithms
    names = [(*pair, n) for pair in NEAR_ALGORITHMS if pair[1] in able for n in plan.sizes_bytes]
    runs = {" ".join(map(str, name)): run_of(group, *name) for name in names}
    times: dict[str, list[float]] = {name: [] for name in runs}
    predicted: dict[str, list[float]] = {name: [] for name in runs}
    costs = _costs(group)
    for _ in range(NEAR_TURNS * plan.turns):
        group.engine.tune(60.0)
        costs = _costs(group)
        for name, every in in_turns(group, runs, 1).items():
            operation, algorithm, nbytes = name.split()
            times[name] += every
            predicted[name].append(
                predicted_s(operation, algorithm, int(nbytes), group.size, costs)
            )
    return Near(
        ranks=group.size,
        costs=costs,
        taken=[_taken(*name, times[" ".join(map(str, name))], min) for name in names],
        predicted_s=[min(every) for every in predicted.values()],
    )


def _costs(group: Group) -> Costs:
    selection = getattr(group.engine, "selection", None)
    if selection is None:
        msg = (
            f"this model measures shared memory, but the group runs on engine {group.engine!r}: "
            "run it on ranks of one host"
        )
        raise ConfigError(msg)
    found: Costs = selection.costs
    return found


def run_of(group: Group, operation: str, name: str, nbytes: int) -> Callable[[], object]:
    """One call of an operation by a named algorithm on l = `nbytes`."""
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


def _taken(
    operation: str,
    algorithm: str,
    nbytes: int,
    times: list[float],
    of: Callable[[list[float]], float] = statistics.median,
) -> Taken:
    low, high = min(times), max(times)
    if len(times) > 1:
        low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return Taken(
        operation=operation,
        algorithm=algorithm,
        nbytes=nbytes,
        seconds=of(times),
        spread=(low, high),
    )


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Plan))
