"""A parameter server by remote calls: trainers pull parameters and push gradients.

    braid run --role ps:1 --role trainer:2 examples/rpc_parameter_server.py

The server is an object with methods that trainers call. First one trainer works alone: the
parameters equal one process, bit by bit. Then all trainers work at the same time without waiting
for each other, except for a lock around each step, so gradients may be some steps old.
"""

import threading

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from braid import rpc

ALONE, TOGETHER, BATCH, RATE = 10, 150, 32, 0.2


def network() -> nn.Module:
    """Return an MLP, with the same values in every process."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class Server:
    """Parameters, and the optimizer that steps them."""

    def __init__(self) -> None:
        self.net = network()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=RATE)
        self.lock = threading.Lock()
        self.pushes = self.stale = 0

    def pull(self) -> tuple[int, list[torch.Tensor]]:
        """Return the number of steps, and copies of the parameters after them."""
        with self.lock:
            return self.pushes, [param.detach().clone() for param in self.net.parameters()]

    def push(self, version: int, grads: list[torch.Tensor]) -> None:
        """Take a step with gradients of the parameters after `version` steps."""
        with self.lock:
            for param, grad in zip(self.net.parameters(), grads, strict=True):
                param.grad = grad
            self.optimizer.step()
            self.stale += self.pushes - version
            self.pushes += 1


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and their classes."""
    images, classes = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(classes)


def batches(number: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of a trainer."""
    x, y = digits()
    generator = torch.Generator().manual_seed(number)
    rows = torch.randint(len(x), (count, BATCH), generator=generator)
    return [(x[samples], y[samples]) for samples in rows]


def train(server: rpc.RRef, number: int, count: int) -> None:
    """Pull, compute gradients, push; runs in a trainer."""
    net, calls = network(), server.rpc_sync()
    params = list(net.parameters())
    for x, y in batches(number, count):
        version, values = calls.pull()
        with torch.no_grad():
            for param, value in zip(params, values, strict=True):
                param.copy_(value)
        loss = functional.cross_entropy(net(x), y)
        calls.push(version, list(torch.autograd.grad(loss, params)))


def alone() -> nn.Module:
    """Return the network that one process trains."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for x, y in batches(0, ALONE):
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def serve(trainers: list[str]) -> None:
    """Hold the parameters, and run the trainers."""
    server = Server()
    shared = rpc.RRef(server)
    rpc.rpc_sync(trainers[0], train, (shared, 0, ALONE))
    same = all(map(torch.equal, server.net.parameters(), alone().parameters()))
    print(f"parameters after {ALONE} steps of one trainer equal one process: {same}")
    calls = [
        rpc.rpc_async(name, train, (shared, number, TOGETHER), timeout=0)
        for number, name in enumerate(trainers, start=1)
    ]
    torch.futures.wait_all(calls)
    x, y = digits()
    right = (server.net(x).argmax(1) == y).float().mean()
    staleness = server.stale / server.pushes
    print(f"{server.pushes} pushes, {staleness:.1f} steps old in the mean: {right:.1%} right")


if __name__ == "__main__":
    rpc.init_rpc()
    if rpc.own_role().name == "ps":
        serve(rpc.names_of("trainer"))
    rpc.shutdown()
