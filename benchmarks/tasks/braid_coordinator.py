"""A task of a coordinator's cluster: null closures per second, and closures while workers die.

Started by `benchmarks.workers.local_tasks` with TF_CONFIG; the chief prints its figures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch
from torch import nn

from braid.strategies.coordinator import ClusterCoordinator
from braid.strategies.parameter_server import ParameterServerStrategy

__all__ = ["main"]

STEP_S = 0.01  # time that a closure waits, such as for its data


class Counts(nn.Module):
    """Counts closures: each closure adds one to the element with its number."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(size))

    def forward(self, number: int) -> torch.Tensor:
        """Return a loss for which a step of SGD with learning rate 1 adds one."""
        return -self.counts[number]


def nothing() -> None:
    """Do nothing."""


def numbers() -> Iterator[int]:
    """Return an endless data set."""
    return iter(range(1 << 60))


def count(batches: Iterator[int], number: int) -> None:
    """Wait for data, compute, and step."""
    next(batches)
    time.sleep(STEP_S)
    optimizer.zero_grad()
    model(number).backward()
    optimizer.step()


def null_closures(closures: int, rounds: int) -> None:
    """Print the closures per second of each round."""
    coordinator = ClusterCoordinator(strategy)
    for number in range(rounds + 1):
        begun = time.perf_counter()
        for _ in range(closures):
            coordinator.schedule(nothing)
        coordinator.join()
        if number:  # the first round is a warm-up
            print("figure", closures / (time.perf_counter() - begun), flush=True)
    coordinator.close()


def counted_closures(phases: int, phase_s: float) -> None:
    """Print the closures per second of each phase, then the number of wrong counts."""
    coordinator = ClusterCoordinator(strategy)
    batches = coordinator.create_per_worker_dataset(numbers)
    total = 0
    coordinator.schedule(count, (batches, total)).fetch()
    for phase in range(phases):
        print("phase", phase, flush=True)
        begun, first = time.perf_counter(), total
        while time.perf_counter() - begun < phase_s:
            total += 1
            coordinator.schedule(count, (batches, total))
        coordinator.join()
        print("figure", (total - first) / (time.perf_counter() - begun), flush=True)
    coordinator.pull()
    wrong = int((model.counts[: total + 1] != 1).sum() + (model.counts[total + 1 :] != 0).sum())
    print("figure", wrong, flush=True)
    coordinator.close()


def main(kind: str, first: str, second: str) -> None:
    """Coordinate, or serve until the coordinator ends."""
    if not strategy.is_chief:
        strategy.serve()
    elif kind == "null":
        null_closures(int(first), int(second))
    else:
        counted_closures(int(first), float(second))


if __name__ == "__main__":
    strategy = ParameterServerStrategy()
    if sys.argv[1] == "counted":
        with strategy.scope():
            model = Counts(20_000)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    main(*sys.argv[1:])
