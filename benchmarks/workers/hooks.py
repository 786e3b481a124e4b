"""One rank of `hooks`: the same training with several hooks, in turns.

Each hook has a separate copy of the model, and all see the same batches, so that their losses after
the last round can also be compared. The task must be learnable in that number of steps: the target
is a function of a few hidden numbers, and the inputs are a noisy linear map of them. (With a
function of all inputs, the loss after hundreds of steps would still be that of predicting zeros,
for every hook.)
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator

import msgspec
import torch
from torch import nn

from braid.cli.bench.workers.ddp_models import WIDTH, job_of
from braid.comm import Group
from braid.context import init, shutdown
from braid.parallel.data_parallel import DistributedDataParallel

__all__ = ["EXACT", "Plan", "Way", "main"]

EXACT = "exact"
TEACHER_SEED = 99
LAST = 10  # steps over which the loss at the end is averaged
# without momentum, which repeats the values that top-k sends late, and doubles the final loss
LEARNING_RATE = 0.5
HIDDEN, NOISE = 4, 0.1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements to make.

    Attributes:
        hooks: Names of communication hooks.
        batch: Number of samples per rank in a step.
        rounds: Number of steps of each hook.
    """

    hooks: tuple[str, ...]
    batch: int
    rounds: int


class Way(msgspec.Struct, kw_only=True):
    """Figures of one communication hook.

    Attributes:
        name: Name of the hook; `exact` without one.
        step_s: Median seconds of a step on the slowest rank.
        speedup: Ratio of a step without a hook to a step with this hook, median of the rounds.
        spread: First and third quartile of the speed-up.
        first_loss: Loss of the first step.
        last_loss: Mean loss of the last steps.
    """

    name: str
    step_s: float
    speedup: float
    spread: tuple[float, float]
    first_loss: float
    last_loss: float


def main(plan: Plan) -> Iterator[Way]:
    """Measure; rank 0 yields the figures of each hook."""
    group = init()
    base = job_of("mlp", 1, seed=0).model
    seen, sought = torch.randn(
        2, HIDDEN, WIDTH, generator=torch.Generator().manual_seed(TEACHER_SEED)
    ) * (HIDDEN**-0.5)
    names = (EXACT, *plan.hooks)
    ways = {name: _Training(copy.deepcopy(base), group, name) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for number in range(plan.rounds):
        generator = torch.Generator().manual_seed(number * group.size + group.rank)
        hidden = torch.randn(plan.batch, HIDDEN, generator=generator)
        x = hidden @ seen + NOISE * torch.randn(plan.batch, WIDTH, generator=generator)
        y = torch.tanh(hidden @ sought)
        for name, way in ways.items():
            group.barrier()
            start = time.perf_counter()
            losses[name].append(way.step(x, y))
            times[name].append(time.perf_counter() - start)
    table = torch.tensor([times[name] for name in names], dtype=torch.float64)
    group.all_reduce(table, "max")
    means = torch.tensor([losses[name] for name in names], dtype=torch.float64)
    group.all_reduce(means, "avg")
    if group.rank == 0:
        yield from _ways(names, table.tolist(), means.tolist())
    group.barrier()
    shutdown()


class _Training:
    """Training steps of one copy of the model."""

    def __init__(self, model: nn.Module, group: Group, name: str) -> None:
        hook = None if name == EXACT else name
        self._model = DistributedDataParallel(model, process_group=group, hook=hook)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        loss = nn.functional.mse_loss(self._model(x), y)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.item()


def _ways(names: tuple[str, ...], times: list[list[float]], losses: list[list[float]]) -> list[Way]:
    warm = min(4, len(times[0]) - 1)  # buckets and formats are created in the first steps
    ways = []
    for name, steps, seen in zip(names, times, losses, strict=True):
        ratios = [exact / mine for exact, mine in zip(times[0][warm:], steps[warm:], strict=True)]
        low, high = ratios[0], ratios[0]
        if len(ratios) > 1:
            low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        ways.append(
            Way(
                name=name,
                step_s=statistics.median(steps[warm:]),
                speedup=statistics.median(ratios),
                spread=(low, high),
                first_loss=seen[0],
                last_loss=statistics.mean(seen[-LAST:]),
            )
        )
    return ways
