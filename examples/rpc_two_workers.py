"""A network for handwritten digits in two processes; remote calls carry its activations.

    braid run -n 2 examples/rpc_two_workers.py

The first process has the first layer and the loss, the second process has the second layer.
Gradients go back through the calls, and a distributed optimizer steps each layer in its process.
The first process also trains the same network alone, and compares both.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from braid import rpc
from braid.rpc import dist_autograd

STEPS, BATCH = 200, 64


def layer(seed: int, inputs: int, outputs: int) -> nn.Linear:
    """Return a layer, with the same values in every process."""
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


def parameters(rref: rpc.RRef) -> list[rpc.RRef]:
    """Return references to the parameters of a layer; runs in its process."""
    return [rpc.RRef(param) for param in rref.local_value().parameters()]


def gradients(rref: rpc.RRef, context: int) -> list[torch.Tensor]:
    """Return the gradients of a layer in a context; runs in the layer's process."""
    known = dist_autograd.get_gradients(context)
    return [known[param] for param in rref.local_value().parameters()]


def train() -> None:
    """Train the network in two processes, and the same network in this process alone."""
    images, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(classes)
    first, second = layer(1, 64, 32), rpc.remote("second", layer, args=(2, 32, 10))
    theirs = rpc.rpc_sync("second", parameters, args=(second,))
    params = [*(rpc.RRef(param) for param in first.parameters()), *theirs]
    optimizer = rpc.DistributedOptimizer(torch.optim.SGD, params, lr=0.5)

    alone = nn.Sequential(layer(1, 64, 32), nn.ReLU(), layer(2, 32, 10))
    stepper = torch.optim.SGD(alone.parameters(), lr=0.5)
    same = True
    for step in range(STEPS):
        rows = torch.randint(len(x), (BATCH,), generator=torch.Generator().manual_seed(step))
        with dist_autograd.context() as context:
            hidden = torch.relu(first(x[rows]))
            loss = functional.cross_entropy(second.rpc_sync().forward(hidden), y[rows])
            dist_autograd.backward(context, [loss])
            known = dist_autograd.get_gradients(context)
            grads = [known[param] for param in first.parameters()]
            grads += rpc.rpc_sync("second", gradients, args=(second, context))
            optimizer.step(context)
        stepper.zero_grad()
        functional.cross_entropy(alone(x[rows]), y[rows]).backward()
        pairs = zip(grads, alone.parameters(), strict=True)
        same = same and all(torch.equal(grad, param.grad) for grad, param in pairs)
        stepper.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    with torch.no_grad():
        right = second.rpc_sync().forward(torch.relu(first(x))).argmax(1) == y
    print(f"{right.float().mean():.1%} right; gradients equal one process: {same}")


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(["first", "second"][rank])
    if rank == 0:
        train()
    rpc.shutdown()
