"""Times many things in turns on all ranks, under the same conditions.

Each is done once, untimed, behind a barrier, so that buffers are there, and then some times, of
which the least counts: on a machine that others use, too, what is longer is theirs. Of the ranks it
is the slowest that counts. A turn goes through all of them before the next begins. A network that
lets more through after a rest is given one before each time, so that it is always in the same
state.
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
WORTH_S = 10e-3  # of one thing in one turn: enough for short ones to be told from the noise


def in_turns(
    group: Group,
    runs: Mapping[str, Run],
    turns: int,
    *,
    rest_s: float = 0.0,
    rested: Collection[str] = (),
) -> dict[str, list[float]]:
    """Least seconds of one `run()`, of the slowest rank, by name and turn; the same on all ranks.

    Args:
        group: All ranks; each calls this with the same names.
        runs: What to time; a rank that has no part in something does nothing.
        turns: How often to go through all of them.
        rest_s: Time for which nothing is sent before each ...
        rested: ... of these: those that send so much that it matters. Whoever rests must wake up,
            too, which is not what a message costs.
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
    own = [
        [
            _seconds(group, run, count, rest_s)
            for run, count in zip(runs.values(), counts, strict=True)
        ]
        for _ in range(turns)
    ]
    slowest = group.all_reduce(torch.tensor(own, dtype=torch.float64), "max").T.tolist()
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
