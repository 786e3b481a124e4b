"""A coordinator schedules closures on two workers; the variables are on a server.

    braid run --servers 1 --workers 2 examples/56_coordinator.py

Training is synchronous: workers run closures in turns, and each step needs a gradient from every
worker. At the end the chief pulls the parameters, and compares them with one process.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from braid.ps import BSP
from braid.strategies.coordinator import ClusterCoordinator
from braid.strategies.parameter_server import ParameterServerStrategy

STEPS, WORKERS = 20, 2


def new_model() -> nn.Module:
    """Return the same model in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return batch `number`."""
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(number))
    return x, x.sum(1, keepdim=True)


strategy = ParameterServerStrategy(consistency=BSP)
with strategy.scope():
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(number: int) -> float:
    """Train on a batch: the optimizer's step pushes gradients, and the server applies them."""
    optimizer.zero_grad()
    x, y = batch(number)
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def alone() -> Iterator[torch.Tensor]:
    """Train in one process with the mean of the gradients of two batches."""
    net = new_model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        sgd.zero_grad()
        for number in range(step * WORKERS, (step + 1) * WORKERS):
            x, y = batch(number)
            (functional.mse_loss(net(x), y) / WORKERS).backward()
        sgd.step()
    return net.parameters()


def main() -> None:
    """Schedule the closures; only the chief calls this function."""
    with ClusterCoordinator(strategy) as coordinator:
        losses = [coordinator.schedule(train, (number,)) for number in range(STEPS * WORKERS)]
        coordinator.join()
        print(f"loss {losses[0].fetch():.3f} at first, {losses[-1].fetch():.3f} at last")
        coordinator.pull()
    same = all(torch.equal(p, q) for p, q in zip(model.parameters(), alone(), strict=True))
    print("parameters equal one process bit by bit" if same else "parameters differ")


if strategy.is_chief:
    main()
else:
    strategy.serve()
