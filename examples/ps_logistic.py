"""Logistic regression on handwritten digits with a parameter server: 2 servers, 2 workers.

    braid run --servers 2 --workers 2 examples/ps_logistic.py

Each worker computes the gradient on its half of each batch; the servers average both gradients in
the order of workers, and step. The weights equal one process bit by bit.
"""

from functools import partial

import torch
from torch.nn import functional

import braid
from braid import ps

STEPS, BATCH = 60, 64


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1,797 images of 8 x 8 pixels with a constant, and their classes."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - only where it is needed

    images, classes = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    return torch.cat([x, torch.ones(len(x), 1)], 1), torch.tensor(classes)


def batch(step: int, worker: int, workers: int) -> torch.Tensor:
    """Return a worker's samples of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1797, (BATCH,), generator=generator).chunk(workers)[worker]


def gradient(weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the mean loss of some samples."""
    leaf = weights.detach().clone().requires_grad_()
    functional.cross_entropy(x[rows] @ leaf, y[rows]).backward()
    return leaf.grad


def alone(workers: int) -> torch.Tensor:
    """Return the weights of one process that computes all workers' gradients in turn."""
    weights = torch.nn.Parameter(torch.zeros(65, 10))
    optimizer = torch.optim.SGD([weights], lr=0.5, momentum=0.9)
    for step in range(STEPS):
        grads = [gradient(weights, batch(step, w, workers)) for w in range(workers)]
        weights.grad = sum(grads[1:], grads[0].clone()) * (1 / workers)
        optimizer.step()
    return weights.detach()


x, y = digits()
group = braid.init()
with ps.join(group) as node:
    make = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    table = node.dense("weights", torch.zeros(65, 10), make)
    if not node.is_worker:
        node.serve()
        print(f"{node.role} {node.number} has served {node.num_workers} workers")
    else:
        for step in range(STEPS):
            table.push(gradient(table.pull(), batch(step, node.number, node.num_workers)))
        weights = table.pull().clone()
        right = (x @ weights).argmax(1) == y
        same = torch.equal(weights, alone(node.num_workers))
        print(f"worker {node.number}: {right.float().mean():.1%} right, as one process: {same}")
        assert same
