"""Time several steps in rounds: in each round each takes one, in an order drawn anew.

Caches favour what ran before, so no step has a fixed place. Ranks begin a step together, and it
lasts until the slowest rank is done.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping

import torch

from braid.comm import Group

__all__ = ["LEAST_ROUNDS", "in_rounds"]

LEAST_ROUNDS = 12  # for a median and quartiles


def in_rounds(
    group: Group,
    steps: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    least_rounds: int = LEAST_ROUNDS,
    budget_s: float = math.inf,
) -> dict[str, list[float]]:
    """Return the seconds of every step, of the slowest rank, by name.

    Args:
        group: Group of all ranks; each calls this with the same names.
        steps: Steps to time, by name; they have warmed up.
        rounds: Largest number of rounds.
        least_rounds: Least number of them, where steps are so long that `budget_s` ends earlier.
        budget_s: Seconds for all rounds, about.
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
    for name, own in times.items():
        slowest = group.all_reduce(torch.tensor(own, dtype=torch.float64), "max")
        times[name] = slowest.tolist()
    return times
