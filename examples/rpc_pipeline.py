"""A pipeline by remote calls: two stages in two processes, and micro-batches that overlap.

    braid run --role master:1 --role stage:2 examples/rpc_pipeline.py

The master sends micro-batches to the first stage, which passes each on to the second one. The
function of a stage returns the future of its call to the next stage, so no thread waits, and the
stage computes the next micro-batch meanwhile. Gradients go back through the calls, and a
distributed optimizer steps each stage in its process. The master also trains the same network
alone, and compares both.
"""

from __future__ import annotations

import threading
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from braid import rpc
from braid.rpc import dist_autograd

STEPS, BATCH, MICROBATCHES, WIDTH = 50, 128, 4, 256
KINDS = ((64, WIDTH, WIDTH), (WIDTH, WIDTH, 10))  # sizes of each stage


def layers(number: int) -> nn.Sequential:
    """Return the layers of a stage, with the same values in every process."""
    torch.manual_seed(number)
    inputs, hidden, outputs = KINDS[number]
    relu = [nn.ReLU()] if number == 0 else []
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs), *relu)


class Stage:
    """Some layers, and a reference to the next stage."""

    def __init__(self, number: int, following: rpc.RRef | None) -> None:
        self.layers = layers(number).double()
        self.following = following
        self.lock = threading.Lock()
        self.busy: list[tuple[float, float]] = []

    @rpc.functions.async_execution
    def forward(self, x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Compute one micro-batch at a time; return the future of the pipeline's output."""
        with self.lock:
            began = time.monotonic()
            y = self.layers(x)
            self.busy.append((began, time.monotonic()))
        if self.following is not None:
            return self.following.rpc_async().forward(y)
        answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        answer.set_result(y)
        return answer

    def parameters(self) -> list[rpc.RRef]:
        """Return references to the parameters."""
        return [rpc.RRef(param) for param in self.layers.parameters()]

    def gradients(self, context: int) -> list[torch.Tensor]:
        """Return the gradients of the parameters in a context."""
        known = dist_autograd.get_gradients(context)
        return [known[param] for param in self.layers.parameters()]

    def intervals(self) -> list[tuple[float, float]]:
        """Return the start and end of each forward."""
        return self.busy


def train() -> None:
    """Train in a pipeline and in this process, and compare."""
    images, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(images) / 16, torch.tensor(classes)
    first_name, second_name = rpc.names_of("stage")
    second = rpc.remote(second_name, Stage, args=(1, None))
    first = rpc.remote(first_name, Stage, args=(0, second))
    stages = (first, second)
    params = [param for stage in stages for param in stage.rpc_sync().parameters()]
    optimizer = rpc.DistributedOptimizer(torch.optim.SGD, params, lr=0.2, momentum=0.9)
    alone = nn.Sequential(layers(0), layers(1)).double()
    stepper = torch.optim.SGD(alone.parameters(), lr=0.2, momentum=0.9)
    largest = 0.0
    for step in range(STEPS):
        rows = torch.randint(len(x), (BATCH,), generator=torch.Generator().manual_seed(step))
        with dist_autograd.context() as context:
            parts = [first.rpc_async().forward(part) for part in x[rows].chunk(MICROBATCHES)]
            scores = torch.cat([part.wait() for part in parts])
            loss = functional.cross_entropy(scores, y[rows])
            dist_autograd.backward(context, [loss])
            grads = [grad for stage in stages for grad in stage.rpc_sync().gradients(context)]
            optimizer.step(context)
        stepper.zero_grad()
        functional.cross_entropy(alone(x[rows]), y[rows]).backward()
        pairs = zip(grads, alone.parameters(), strict=True)
        largest = max(largest, *((grad - p.grad).abs().max().item() for grad, p in pairs))
        stepper.step()
    ones, twos = (stage.rpc_sync().intervals() for stage in stages)
    overlaps = sum(any(a < d and c < b for c, d in twos) for a, b in ones)
    right = (first.rpc_sync().forward(x).argmax(1) == y).float().mean()
    print(f"{overlaps} of {len(ones)} forwards of the first stage overlap with the second one's")
    print(f"{right:.1%} right; gradients equal one process: {largest < 1e-12}")


if __name__ == "__main__":
    rpc.init_rpc()
    if rpc.own_role().name == "master":
        train()
    rpc.shutdown()
