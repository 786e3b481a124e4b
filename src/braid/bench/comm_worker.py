"""One rank of `braid bench comm`: every operation of braid and of Gloo, taken in turns.

Absolute times on a shared machine are worth little: they drift within seconds. So both libraries run in the same processes,
on the same tensors, in short alternating rounds; a ratio is taken within each round, and the median of the rounds' ratios
is what is reported.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import distributed as dist

from braid.comm import Group
from braid.context import init, shutdown

__all__ = ["Plan", "Row", "main"]

Run = Callable[[], object]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        operations: Names, as in `_candidates`.
        sizes_bytes: Bytes of the largest full buffer of a rank.
        dtypes: torch's names.
        rounds: Alternating rounds for each row.
        budget_s: Seconds of one library in one round, about.
        out: File for the rows, written by rank 0.
    """

    operations: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    dtypes: tuple[str, ...]
    rounds: int
    budget_s: float
    out: str


class Row(msgspec.Struct, kw_only=True):
    """One measurement.

    Attributes:
        operation: Name.
        dtype: Name.
        nbytes: Bytes of the largest full buffer of a rank.
        ranks: World size.
        seconds: Median seconds by library: gloo, braid, and registered where it exists.
        ratio: Gloo's time over braid's, median of the rounds, by library.
        spread: Lowest and highest ratio of the rounds, by library.
    """

    operation: str
    dtype: str
    nbytes: int
    ranks: int
    seconds: dict[str, float]
    ratio: dict[str, float]
    spread: dict[str, tuple[float, float]]


def main(plan: Plan) -> None:
    """Measure everything; rank 0 prints a line per row and writes the file."""
    torch.set_num_threads(1)
    group = init()
    dist.init_process_group("gloo")
    rows = []
    for operation in plan.operations:
        for dtype in plan.dtypes:
            for nbytes in plan.sizes_bytes if operation != "barrier" else (0,):
                row = _measure(group, operation, getattr(torch, dtype), nbytes, plan)
                rows.append(row)
                if group.rank == 0:
                    print(json.dumps(msgspec.to_builtins(row)), flush=True)
            if operation == "barrier":
                break
    if group.rank == 0:
        Path(plan.out).write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    dist.destroy_process_group()
    shutdown()


def _measure(group: Group, operation: str, dtype: torch.dtype, nbytes: int, plan: Plan) -> Row:
    candidates = _candidates(group, operation, dtype, nbytes)
    counts = {name: _count(group, run, plan.budget_s) for name, run in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(plan.rounds):
        for name, run in candidates.items():
            times[name].append(_median_s(group, run, counts[name]))
    ratios = {
        name: [g / t for g, t in zip(times["gloo"], ours, strict=True)]
        for name, ours in times.items()
        if name != "gloo"
    }
    return Row(
        operation=operation,
        dtype=str(dtype).removeprefix("torch."),
        nbytes=nbytes,
        ranks=group.size,
        seconds={name: statistics.median(t) for name, t in times.items()},
        ratio={name: statistics.median(r) for name, r in ratios.items()},
        spread={name: (min(r), max(r)) for name, r in ratios.items()},
    )


def _candidates(group: Group, operation: str, dtype: torch.dtype, nbytes: int) -> dict[str, Run]:
    """The same operation by Gloo, by braid on ordinary tensors, and on registered ones."""
    n, me = group.size, group.rank
    numel = max(n, nbytes // dtype.itemsize // n * n)
    x, out = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)  # sums stay finite
    shared = group.empty((numel,), dtype).zero_()
    part, shared_part, small = x[: numel // n], shared[: numel // n], out[: numel // n]
    after, before = (me + 1) % n, (me - 1) % n

    def braid_chain() -> None:
        if me == 0:  # once around the ring
            group.send(x, after)
            group.recv(out, before)
        else:
            group.recv(out, before)
            group.send(x, after)

    def gloo_chain() -> None:
        if me == 0:
            dist.send(x, after)
            dist.recv(out, before)
        else:
            dist.recv(out, before)
            dist.send(x, after)

    table: dict[str, dict[str, Run]] = {
        "all_reduce": {
            "gloo": lambda: dist.all_reduce(x),
            "braid": lambda: group.all_reduce(x),
            "registered": lambda: group.all_reduce(shared),
        },
        "broadcast": {
            "gloo": lambda: dist.broadcast(x, 0),
            "braid": lambda: group.broadcast(x, 0),
            "registered": lambda: group.broadcast(shared, 0),
        },
        "all_gather": {
            "gloo": lambda: dist.all_gather_into_tensor(out, part),
            "braid": lambda: group.all_gather(part, out=out),
            "registered": lambda: group.all_gather(shared_part, out=out),
        },
        "reduce_scatter": {
            "gloo": lambda: dist.reduce_scatter_tensor(small, x),
            "braid": lambda: group.reduce_scatter(x, out=small),
            "registered": lambda: group.reduce_scatter(shared, out=small),
        },
        "all_to_all": {
            "gloo": lambda: dist.all_to_all_single(out, x),
            "braid": lambda: group.all_to_all(x, out=out),
            "registered": lambda: group.all_to_all(shared, out=out),
        },
        "send_recv": {"gloo": gloo_chain, "braid": braid_chain},
        "barrier": {"gloo": dist.barrier, "braid": group.barrier},
    }
    return table[operation]


def _count(group: Group, run: Run, budget_s: float) -> int:
    """Repetitions that fill the budget; the same on all ranks."""
    run()
    start = time.perf_counter()
    run()
    run()
    once = torch.tensor([(time.perf_counter() - start) / 2], dtype=torch.float64)
    group.all_reduce(once, "max")
    return int(min(2000, max(3, budget_s / max(once.item(), 1e-6))))


def _median_s(group: Group, run: Run, count: int) -> float:
    times = []
    group.barrier()
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Plan))
