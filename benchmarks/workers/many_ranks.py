"""Runs Horovod's state machine for many ranks in one process, to compare the first with the others.

The first rank merges the lists of all ranks, so it could become a bottleneck. In steady state,
ranks exchange bits instead of lists, and each rank does the same work.
"""

from __future__ import annotations

import operator
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial, reduce
from typing import TypeVar

import msgspec

from braid.compat.horovod.fusion import FusionState, Request

__all__ = ["Thousand", "many_ranks"]

X = TypeVar("X")


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
        together = reduce(operator.and_, (int.from_bytes(bitmask, "little") for bitmask in bits))
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
