"""Times several functions in rounds: each round calls every function once, in a random order.

Caches favour the function that ran before, so the order changes. Ranks begin a call together, and
the call lasts until the slowest rank is finished.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from braid.comm import Group

__all__ = ["LEAST_ROUNDS", "in_rounds", "median_ratio"]

LEAST_ROUNDS = 12  # enough for a median and quartiles


def in_rounds(
    group: Group,
    steps: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    least_rounds: int = LEAST_ROUNDS,
    budget_s: float = math.inf,
) -> dict[str, list[float]]:
    """Return the slowest rank's seconds for every call, by name.

    Args:
        group: Group of all ranks; each calls this with the same names.
        steps: Functions to time, by name, after their warm-up.
        rounds: Largest number of rounds.
        least_rounds: Smallest number of rounds, even if `budget_s` is exceeded.
        budget_s: Approximate seconds for all rounds.
    """
    shuffler, names = random.Random(0), list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    for number in range(rounds):
        if math.isfinite(budget_s):
            over = torch.tensor([time.perf_counter() - began > budget_s])
            if group.broadcast(over, 0).item() and number >= least_rounds:
                break
        shuffler.shuffle(names)
        for name in names:
            group.barrier()
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        slowest = group.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max")
        times[name] = slowest.tolist()
    return times


def median_ratio(times: Sequence[float], other_times: Sequence[float]) -> float:
    """Return the median over the rounds of the ratio of two functions' times.

    A ratio within a round is hardly changed by other programs, since they slow both down.
    """
    return statistics.median(a / b for a, b in zip(times, other_times, strict=True))
