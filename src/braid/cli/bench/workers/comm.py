"""One rank of `braid bench comm`: every operation with every library, in turns.

Absolute times on a shared machine drift within seconds. So all libraries run
in the same processes, on the same tensors, in short alternating rounds. A ratio is computed within
each round, and the report shows the median of the rounds' ratios.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import distributed as dist

from braid.cli.bench.workers.candidates import runs_of
from braid.comm import Group
from braid.context import init, shutdown

__all__ = ["CommPlan", "Row", "main"]

Run = Callable[[], object]


class CommPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives and sizes to measure.

    Attributes:
        operations: Names, as in `candidates`.
        libraries: Names, as in `candidates`; all libraries are compared with the first.
        sizes_bytes: Bytes of the largest full buffer of a rank.
        dtypes: torch's names.
        rounds: Number of alternating rounds for each row.
        budget_s: Approximate seconds of one library in one round.
    """

    operations: tuple[str, ...]
    libraries: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    dtypes: tuple[str, ...]
    rounds: int
    budget_s: float


class ExplainedAlgorithms(msgspec.Struct):
    """Text about the algorithms that braid chose."""

    explained: str


class Row(msgspec.Struct, kw_only=True):
    """Measurement of one collective at one size.

    Attributes:
        operation: Name of the operation.
        dtype: Name of the dtype.
        nbytes: Bytes of the largest full buffer of a rank.
        ranks: World size.
        seconds: Median seconds by library.
        ratio: Gloo's time divided by the library's time, median of the rounds.
        spread: Lowest and highest of these ratios.
        over_mpi: MPI's time divided by the library's time, if MPI was measured.
    """

    operation: str
    dtype: str
    nbytes: int
    ranks: int
    seconds: dict[str, float]
    ratio: dict[str, float]
    spread: dict[str, tuple[float, float]]
    over_mpi: dict[str, float] = {}


def main(plan: CommPlan) -> Iterator[Row | ExplainedAlgorithms]:
    """Measure everything; rank 0 yields a row at a time."""
    _from_mpi(os.environ)
    group = init()
    dist.init_process_group("gloo")
    over_braid = dist.new_group(backend="braid") if "torch" in plan.libraries else None
    for operation in plan.operations:
        for dtype in plan.dtypes:
            for nbytes in plan.sizes_bytes if operation != "barrier" else (0,):
                runs = runs_of(
                    plan.libraries, operation, getattr(torch, dtype), nbytes, group, over_braid
                )
                row = _measure(group, operation, dtype, nbytes, runs, plan)
                if group.rank == 0:
                    yield row
            if operation == "barrier":
                break
    if group.rank == 0:
        yield ExplainedAlgorithms(explained=group.engine.explain())
    dist.destroy_process_group()
    shutdown()


def _measure(
    group: Group, operation: str, dtype: str, nbytes: int, runs: dict[str, Run], plan: CommPlan
) -> Row:
    counts = {name: _count(group, run, plan.budget_s) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(plan.rounds):
        for name, run in runs.items():
            times[name].append(_median_s(group, run, counts[name]))

    def over(base: str) -> dict[str, list[float]]:
        return {
            name: [b / t for b, t in zip(times[base], seconds, strict=True)]
            for name, seconds in times.items()
            if name != base and base in times
        }

    ratios = over("gloo")
    return Row(
        operation=operation,
        dtype=dtype,
        nbytes=nbytes,
        ranks=group.size,
        seconds={name: statistics.median(t) for name, t in times.items()},
        ratio={name: statistics.median(r) for name, r in ratios.items()},
        spread={name: (min(r), max(r)) for name, r in ratios.items()},
        over_mpi={name: statistics.median(r) for name, r in over("mpi").items()},
    )


def _from_mpi(environment: Any) -> None:
    """Set the variables of torch's launcher from the variables of mpiexec."""
    names = {"OMPI_COMM_WORLD_RANK": "RANK", "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE"}
    for theirs, ours in names.items():
        if theirs in environment:
            environment[ours] = environment[theirs]


def _count(group: Group, run: Run, budget_s: float) -> int:
    """Return the number of repetitions that fill the budget; the same on all ranks."""
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
