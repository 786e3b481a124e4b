"""Schedules made by costs: an idle rank does the most urgent work that is possible.

Each rank prefers, in this order: I (another rank waits for it), F (of the last possible stage,
because its backward comes first) while it holds fewer activations than its limit, W (no rank waits
for it, so it fills idle time). The schedule depends only on the costs and on the limit:

    costs f = i = w                       limit of rank r       bubble
    vee, 2 stages per rank                2p stages             ZBV
    one stage per rank                    2p - 1                ZB-H2: no rank is ever idle between
                                                                its first and its last work

With several stages per rank, a limit alone leads to a deadlock: forwards of the first stage fill
the memory of a rank, and its second stage cannot run the forward that its memory-freeing backward
needs. So a forward keeps a reserve. It starts only if every unfinished micro-batch, the oldest
first, can still get memory for its stages on this rank, after the earlier ones have ended. This
refuses exactly the forwards that lead to a certain deadlock. So every limit works that holds one
micro-batch: one activation per stage of the rank.

If the reserve is small, too many unfinished micro-batches wait for each other. So up to ten
schedules with fewer of them, from half of the limit on, are made as well, and the fastest is
returned.

Source: R. Graham, Bounds on multiprocessing timing anomalies, 1969 (list scheduling); E. Dijkstra,
EWD 623, 1977 (the banker's reserve); P. Qi et al., Zero bubble pipeline parallelism, ICLR 2024, and
Pipeline parallelism with controllable memory, NeurIPS 2024.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from braid.errors import ConfigError
from braid.programs.schedule.pipeline.linear import StageWork, check_size, pipeline_program
from braid.programs.schedule.program import Program

__all__ = ["StageCosts", "list_schedule", "listed_work"]


class StageCosts(NamedTuple):
    """Seconds of the work of one stage on a micro-batch, and of a message to its neighbours."""

    forward_s: float = 1.0
    input_s: float = 1.0
    weight_s: float = 1.0
    message_s: float = 0.0


def list_schedule(
    placement: Sequence[int],
    num_microbatches: int,
    limits: Sequence[int],
    costs: Sequence[StageCosts] | None = None,
    *,
    name: str = "list",
) -> Program:
    """Make a program with split backwards by list scheduling.

    Args:
        placement: Rank of each stage.
        num_microbatches: Number of micro-batches.
        limits: Largest number of activations (of one stage and micro-batch) on each rank; at least
            the number of its stages.
        costs: Seconds of each stage's work; equal costs when None.
        name: Name of the program.

    Raises:
        ConfigError: No schedule keeps these limits; the message names the smallest possible limits.
    """
    num_ranks = max(placement) + 1 if placement else 0
    check_size(num_ranks, num_microbatches)
    if len(limits) != num_ranks:
        msg = f"limits must be {num_ranks} numbers, one for each rank, got {list(limits)}"
        raise ConfigError(msg)
    num_stages = Counter(placement)
    least = [max(1, num_stages[rank]) for rank in range(num_ranks)]
    if any(limit < low for limit, low in zip(limits, least, strict=True)):
        msg = (
            f"limits {list(limits)} are too small for any schedule: a rank stores an activation "
            f"per stage before its first backward, so use at least {least}"
        )
        raise ConfigError(msg)
    costs = [StageCosts()] * len(placement) if costs is None else costs
    if len(costs) != len(placement):
        msg = f"costs must have one entry for each of {len(placement)} stages, got {len(costs)}"
        raise ConfigError(msg)
    _, work = listed_work(placement, num_microbatches, limits, costs)
    return pipeline_program(name, work, placement, num_microbatches)


def listed_work(
    placement: Sequence[int],
    num_microbatches: int,
    limits: Sequence[int],
    costs: Sequence[StageCosts],
) -> tuple[float, list[list[StageWork]]]:
    """Return the fastest list schedule within limits: its seconds, and each rank's work.

    Args:
        placement: Rank of each stage.
        num_microbatches: Number of micro-batches.
        limits: Largest number of activations on each rank; see `list_schedule`, which checks it.
        costs: Seconds of each stage's work.

    Cost: O(actions x ranks x limit); ten times that if limits stop work in the first attempt.
    """
    first = _ListSchedule(placement, num_microbatches, limits, costs, num_microbatches)
    best = first.run(), first.work
    if not first.was_short:
        return best
    limit = limits[placement[0]]
    windows = range(max(1, limit // 2), min(limit, num_microbatches), max(1, limit // 16))
    for window in windows:
        narrow = _ListSchedule(placement, num_microbatches, limits, costs, window)
        best = min(best, (narrow.run(), narrow.work), key=lambda timed: timed[0])
    return best


class _ListSchedule:
    """One list schedule, with at most `window` micro-batches between F and W of the first stage."""

    def __init__(
        self,
        placement: Sequence[int],
        num_microbatches: int,
        limits: Sequence[int],
        costs: Sequence[StageCosts],
        window: int,
    ) -> None:
        self._placement = placement
        self._num_microbatches = num_microbatches
        self._limits = limits
        self._costs = costs
        self._window = window
        self._last = len(placement) - 1
        num_ranks = max(placement) + 1
        self._stages = [
            [s for s in range(len(placement)) if placement[s] == rank] for rank in range(num_ranks)
        ]
        self._done_s: dict[tuple[str, int, int], float] = {}
        self._next = {kind: [0] * len(placement) for kind in "FIW"}
        self._held = [0] * num_ranks
        self._free_s = [0.0] * num_ranks
        self._events = [0.0]
        self.work: list[list[StageWork]] = [[] for _ in range(num_ranks)]
        self.was_short = False  # whether a forward did not start because of the reserve

    def run(self) -> float:
        num_left = 3 * len(self._placement) * self._num_microbatches
        while self._events:
            now_s = heapq.heappop(self._events)
            while self._events and self._events[0] == now_s:
                heapq.heappop(self._events)
            for rank in range(len(self._stages)):
                if self._free_s[rank] > now_s:
                    continue
                possible = [item for s in self._stages[rank] for item in self._possible(s, now_s)]
                if possible:
                    self._do(rank, min(possible)[-1], now_s)
                    num_left -= 1
        assert not num_left  # the reserve excludes deadlocks
        return max(self._free_s)

    def _possible(self, stage: int, now_s: float) -> list[tuple[int, int, int, StageWork]]:
        """Return work of a stage that can begin now, with its urgency before it."""
        rank, possible = self._placement[stage], []
        i = self._next["I"][stage]
        if self._has("F", stage, i, now_s) and (
            stage == self._last or self._has("I", stage + 1, i, now_s, of=stage)
        ):
            possible.append((0, i, -stage, StageWork("I", stage, i)))
        f = self._next["F"][stage]
        is_there = stage == 0 or self._has("F", stage - 1, f, now_s, of=stage)
        if f < self._num_microbatches and is_there and self._may_hold(rank, stage, f):
            possible.append((1, -stage, f, StageWork("F", stage, f)))
        w = self._next["W"][stage]
        if self._has("I", stage, w, now_s):
            possible.append((2, w, stage, StageWork("W", stage, w)))
        return possible

    def _may_hold(self, rank: int, stage: int, f: int) -> bool:
        """Return whether a rank has memory for F of a stage on micro-batch `f`, and its reserve."""
        if self._held[rank] >= self._limits[rank]:
            return False
        forwards = self._next["F"]
        if stage == 0 and f - self._next["W"][0] >= self._window:
            return False
        kept = 1  # activations of micro-batches under way, from the i-th on, and of this forward
        for i in reversed(range(forwards[self._last], forwards[0])):
            num_held = sum(forwards[s] > i for s in self._stages[rank])
            kept += num_held
            needed = len(self._stages[rank]) - num_held
            if i < f and kept + needed > self._limits[rank]:
                self.was_short = True
                return False
        return True

    def _has(self, kind: str, stage: int, i: int, now_s: float, of: int | None = None) -> bool:
        """Return whether work has ended, and its message has come to stage `of`."""
        done_s = self._done_s.get((kind, stage, i))
        if done_s is None:
            return False
        apart = of is not None and self._placement[of] != self._placement[stage]
        return done_s + (self._costs[stage].message_s if apart else 0.0) <= now_s

    def _do(self, rank: int, item: StageWork, now_s: float) -> None:
        costs = self._costs[item.stage]
        seconds = {"F": costs.forward_s, "I": costs.input_s, "W": costs.weight_s}[item.kind]
        end_s = now_s + seconds
        self._next[item.kind][item.stage] += 1
        self._held[rank] += (item.kind == "F") - (item.kind == "W")
        self._done_s[item.kind, item.stage, item.microbatch] = end_s
        self._free_s[rank] = end_s
        self.work[rank].append(item)
        heapq.heappush(self._events, end_s)
        if costs.message_s:
            heapq.heappush(self._events, end_s + costs.message_s)
