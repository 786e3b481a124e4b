"""A network on a parameter server: two servers hold and update its parameters, three workers train.

braid run --servers 2 --workers 3 examples/30_parameter_server.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import braid
from braid import ps

D, H, ROWS, STEPS = 128, 4000, 24, 10
OPTIMIZER = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def batch(step: int, worker: int, workers: int) -> torch.Tensor:
    x = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(step))
    return x.chunk(workers)[worker]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, D))


def gradient(model: nn.Sequential, values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the mean loss on rows `x`, at these values of all parameters."""
    nn.utils.vector_to_parameters(values.clone(), model.parameters())
    model.zero_grad()
    nn.functional.mse_loss(model(x), -x).backward()
    return nn.utils.parameters_to_vector(p.grad for p in model.parameters())


def alone(workers: int) -> torch.Tensor:
    """Train in one process, which computes the gradients of all workers in turn."""
    model = network()
    values = nn.Parameter(nn.utils.parameters_to_vector(model.parameters()).detach())
    optimizer = OPTIMIZER([values])
    for step in range(STEPS):
        grads = [gradient(model, values.detach(), batch(step, w, workers)) for w in range(workers)]
        values.grad = sum(grads[1:], grads[0].clone()) * (1 / workers)
        optimizer.step()
    return values.detach()


def main() -> None:
    with ps.join(braid.init()) as node:
        model = network()
        first = nn.utils.parameters_to_vector(model.parameters()).detach()
        table = node.dense("network", first, OPTIMIZER)
        van = node.postoffice.van
        if not node.is_worker:
            node.serve()  # the scheduler, and both servers
            counts = van.statistics()
            if node.server is not None:
                heads = sum(s.state.applied.number > 0 for s in node.server.shards)
                here = f"head of {heads} of {table.num_shards} shards"
                print(f"{here}: {counts.received_bytes:,} bytes in, {counts.sent_bytes:,} out")
            return
        for step in range(STEPS):
            values = table.pull()
            table.push(gradient(model, values, batch(step, node.number, node.num_workers)))
        values = table.pull().clone()
        counts = van.statistics()
        ideal = STEPS * first.nbytes
        print(f"sent {counts.sent_bytes:,} bytes of {STEPS} gradients of {ideal:,} bytes together")
        assert torch.equal(values, alone(node.num_workers))
        print("the parameters equal one process bit by bit")


if __name__ == "__main__":
    main()
