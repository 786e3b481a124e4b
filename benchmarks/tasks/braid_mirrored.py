"""A worker of braid's MultiWorkerMirroredStrategy, which prints the loss of each step."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional

from benchmarks.tasks.numpy_problem import LR, batch, weights
from braid.strategies import MultiWorkerMirroredStrategy

__all__ = ["main"]


def main(steps: int) -> None:
    """Train for some steps."""
    strategy = MultiWorkerMirroredStrategy()
    with strategy.scope():
        shapes = [tensor.shape for tensor in weights()]
        first, second = nn.Linear(*shapes[0]), nn.Linear(*shapes[2])
        model = nn.Sequential(first, nn.Tanh(), second)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with torch.no_grad():
        for param, value in zip(model.parameters(), weights(), strict=True):
            param.copy_(torch.from_numpy(value.T))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    data = [tuple(map(torch.from_numpy, batch(number))) for number in range(steps)]
    for part in strategy.experimental_distribute_dataset(data):
        loss = strategy.reduce("mean", strategy.run(step, args=part))
        print("figure", float(loss), flush=True)
    strategy.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
