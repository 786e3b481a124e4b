"""Times several functions in turns on all ranks, under the same conditions.

In each turn, each function runs once, untimed, after a barrier, so that buffers exist. Then it runs
several times, and the smallest time is used: on a shared machine, longer times are due to other
programs. The time of the slowest rank is used. A turn goes through all functions before the next
turn begins. Some networks are faster after a rest; then each run begins with a rest, so that the
network is always in the same state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import torch

from braid.comm import Group

__all__ = ["in_turns"]

Run = Callable[[], object]
LEAST_COUNT, MOST_COUNT = 3, 50
MOST_RESTED = 10
WORTH_S = 10e-3  # seconds for one function in one turn: enough to measure short functions


def in_turns(
    group: Group,
    runs: Mapping[str, Run],
    turns: int,
    *,
    rest_s: float = 0.0,
    rested: Collection[str] = (),
) -> dict[str, list[float]]:
    """Return the smallest seconds of each function in each turn, for the slowest rank.

    Args:
        group: Group of all ranks; each calls this with the same names.
        runs: Functions to time, by name; a rank that does not take part passes a function that
            returns immediately.
        turns: Number of turns through all functions.
        rest_s: Seconds without messages before each run of a function in `rested`.
        rested: Names of functions that send enough bytes for a rest to matter. For other functions,
            waking up after a rest would distort the time.

    Returns:
        The seconds by name and turn, the same on all ranks.
    """
    once = torch.tensor([[_seconds(group, run, 1, 0.0) for run in runs.values()] for _ in range(2)])
    rests = [rest_s if name in rested else 0.0 for name in runs]
    counts = [
        int(
            min(MOST_RESTED if rest else MOST_COUNT, max(LEAST_COUNT, WORTH_S / max(seconds, 1e-7)))
        )
        for seconds, rest in zip(
            group.all_reduce(once[-1].contiguous(), "max").tolist(), rests, strict=True
        )
    ]
    local_seconds = [
        [
            _seconds(group, run, count, rest_s)
            for run, count in zip(runs.values(), counts, strict=True)
        ]
        for _ in range(turns)
    ]
    slowest = group.all_reduce(torch.tensor(local_seconds, dtype=torch.float64), "max").T.tolist()
    return dict(zip(runs, slowest, strict=True))


def _seconds(group: Group, run: Run, count: int, rest_s: float) -> float:
    group.barrier()
    run()
    times = []
    for _ in range(count):
        if rest_s:
            time.sleep(rest_s)
            group.barrier()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
