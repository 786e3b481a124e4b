"""One rank of the saves of `zero`: a checkpoint saved synchronously and in the background.

    synchronous    training waits until the checkpoint is complete
    background     training waits only for a copy, and continues while the copy is written

Both save the same tensors, in turns. Steps of matrix products and an all_reduce run meanwhile.
"""

from __future__ import annotations

import shutil
import statistics
import time

import msgspec
import torch

from braid.checkpoint import BackgroundSaver, ReplicatedSnapshot, save
from braid.comm import Group
from braid.context import init, shutdown

__all__ = ["Plan", "Saves", "main"]

TENSOR_MIB = 64
WIDTH = 1024  # width of the matrix of a step
STEPS = 20


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Saves to measure.

    Attributes:
        mib: MiB of the checkpoint.
        rounds: Number of saves of each kind.
        directory: Directory for the checkpoints, which is removed.
    """

    mib: int
    rounds: int
    directory: str


class Saves(msgspec.Struct, kw_only=True):
    """Figures of saves; medians over the rounds, of the slowest rank.

    Attributes:
        mib: MiB of the checkpoint.
        at_once_s: Seconds of a synchronous save.
        stall_s: Seconds for which training waits for a background save.
        write_s: Seconds until the background save is complete.
        step_s: Seconds of a step without a save.
        step_behind_s: Seconds of a step during a background save.
    """

    mib: int
    at_once_s: float
    stall_s: float
    write_s: float
    step_s: float
    step_behind_s: float


def main(plan: Plan) -> Saves | None:
    """Measure; rank 0 returns the figures."""
    group = init()
    number = max(1, plan.mib // TENSOR_MIB)
    tensors = {f"model/{i}": torch.randn(TENSOR_MIB << 18) for i in range(number)}
    snapshot = ReplicatedSnapshot(tensors, rank=group.rank, size=group.size)
    matrix = torch.randn(WIDTH, WIDTH)
    with BackgroundSaver(group) as saver:
        saver.save(plan.directory, snapshot, step=0)  # allocates the memory of the copy
        saver.wait()
        rows = [
            _round(group, plan.directory, snapshot, saver, matrix, number)
            for number in range(plan.rounds)
        ]
    slowest = group.all_reduce(torch.tensor(rows, dtype=torch.float64), "max")
    figures = None
    if group.rank == 0:
        medians = [statistics.median(column) for column in slowest.t().tolist()]
        names = ("at_once_s", "stall_s", "write_s", "step_s", "step_behind_s")
        figures = Saves(mib=plan.mib, **dict(zip(names, medians, strict=True)))
        shutil.rmtree(plan.directory)
    group.barrier()
    shutdown()
    return figures


def _round(
    group: Group,
    directory: str,
    snapshot: ReplicatedSnapshot,
    saver: BackgroundSaver,
    matrix: torch.Tensor,
    number: int,
) -> list[float]:
    quiet = [_step(group, matrix) for _ in range(STEPS)]
    group.barrier()
    began = time.perf_counter()
    save(directory, snapshot, step=2 * number + 1, group=group, keep=1)
    at_once_s = time.perf_counter() - began
    group.barrier()
    saving = saver.save(directory, snapshot, step=2 * number + 2, keep=1)
    busy = [_step(group, matrix) for _ in range(STEPS)]
    saving.wait()
    steps = statistics.median(quiet), statistics.median(busy)
    return [at_once_s, saving.stall_s, saving.write_s, *steps]


def _step(group: Group, matrix: torch.Tensor) -> float:
    began = time.perf_counter()
    for _ in range(4):
        torch.mm(matrix, matrix)
    group.all_reduce(matrix[0].clone())
    return time.perf_counter() - began
