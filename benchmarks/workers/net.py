"""One rank of `net`: all-reduce by Gloo, by braid and in compressed formats, in turns.

Every repetition begins after a barrier, lasts until the slowest rank is done, and is followed by
a repetition of the next library. So other load on the machine and its network affects all equally.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import msgspec
import torch
from torch import distributed as dist

from braid.comm import Group
from braid.context import init, shutdown

__all__ = ["Plan", "Row", "main"]

MOST_TURNS = 200
BASE = "gloo"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements to make.

    Attributes:
        sizes_bytes: Sizes of the tensor, multiples of 4.
        wires: Compressed formats for the network to measure in addition to float32.
        turns: Smallest number of repetitions of each library.
        budget_s: Approximate seconds for one library and size.
        drain_bytes: Bytes that every rank sends before each repetition, to empty the token buckets
            of the links (`lab`).
    """

    sizes_bytes: tuple[int, ...]
    wires: tuple[str, ...]
    turns: int
    budget_s: float
    drain_bytes: int = 0


class Row(msgspec.Struct, kw_only=True):
    """Figures of all-reduce of float32 at one size.

    Attributes:
        nbytes: Bytes of the tensor.
        seconds: Median of the slowest rank, by library or wire format.
        ratio: Gloo's time over this one's, median of the turns.
        spread: First and third quartile of these ratios.
    """

    nbytes: int
    seconds: dict[str, float]
    ratio: dict[str, float]
    spread: dict[str, tuple[float, float]]


def main(plan: Plan) -> Iterator[Row]:
    """Measure; rank 0 yields a row per size."""
    group = init()
    dist.init_process_group(BASE)
    generator = torch.Generator().manual_seed(group.rank)
    for nbytes in plan.sizes_bytes:
        # random, since the bytes of a sparse format depend on the numbers
        numbers = torch.randn(nbytes // 4, generator=generator)
        x = torch.empty_like(numbers)
        runs: dict[str, Callable[[], object]] = {
            # mypy does not infer lambdas with defaults
            BASE: lambda x=x: dist.all_reduce(x),  # type: ignore[misc]
            "braid": lambda x=x: group.all_reduce(x),  # type: ignore[misc]
        }
        for wire in plan.wires:
            runs[wire] = lambda x=x, wire=wire: group.all_reduce(x, wire=wire)  # type: ignore[misc]
        row = row_of(nbytes, _measure(group, x, numbers, runs, plan))
        if group.rank == 0:
            yield row
    group.barrier()
    dist.destroy_process_group()
    shutdown()


def row_of(nbytes: int, times: dict[str, list[float]]) -> Row:
    """Compute medians over turns; ratios are computed within each turn."""
    ratios = {
        name: [base / seconds for base, seconds in zip(times[BASE], every, strict=True)]
        for name, every in times.items()
        if name != BASE
    }
    return Row(
        nbytes=nbytes,
        seconds={name: statistics.median(every) for name, every in times.items()},
        ratio={name: statistics.median(every) for name, every in ratios.items()},
        spread={name: _quartiles(every) for name, every in ratios.items()},
    )


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _measure(
    group: Group,
    x: torch.Tensor,
    numbers: torch.Tensor,
    runs: dict[str, Callable[[], object]],
    plan: Plan,
) -> dict[str, list[float]]:
    """Time each library in every turn: seconds of the slowest rank."""
    drain = torch.zeros(plan.drain_bytes // 4)

    def once(run: Callable[[], object]) -> float:
        x.copy_(numbers)
        if drain.numel():
            group.all_reduce(drain)
        group.barrier()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    first = [once(run) for run in runs.values()]  # buffers are allocated in the first run
    again = [once(run) for run in runs.values()]
    dearest = torch.tensor([max(map(min, zip(first, again, strict=True)))], dtype=torch.float64)
    group.all_reduce(dearest, "max")
    turns = int(min(MOST_TURNS, max(plan.turns, plan.budget_s / max(dearest.item(), 1e-6))))
    local = [[once(run) for run in runs.values()] for _ in range(turns)]
    slowest = group.all_reduce(torch.tensor(local, dtype=torch.float64), "max").T.tolist()
    return dict(zip(runs, slowest, strict=True))
