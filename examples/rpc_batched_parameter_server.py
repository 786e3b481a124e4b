"""A parameter server by remote calls that averages the gradients of all trainers, batch by batch.

    braid run --role ps:1 --role trainer:3 examples/rpc_batched_parameter_server.py

Each trainer sends a gradient and gets new parameters. The server answers when all trainers have
sent their gradients: the function returns a future, so that no thread of the server waits. The last
trainer dies half-way, and the others continue without it.
"""

import os
import threading
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch.nn import functional

from braid import rpc
from braid.errors import PeerLostError

STEPS, BATCH, DIES_AT = 60, 32, 30


class Server:
    """Parameters, and the gradients of the current step."""

    def __init__(self, trainers: int) -> None:
        self.weights = torch.zeros(65, 10)
        self.lock = threading.Lock()
        self.expected = trainers
        self.grads: list[torch.Tensor] = []
        self.answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.updates = 0

    @rpc.functions.async_execution
    def step(self, grad: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Add a gradient; return a future of the parameters after the step with all gradients."""
        with self.lock:  # the gradient counts under the lock, or updates would be lost
            self.grads.append(grad)
            answer = self.answer
        self.complete()
        return answer

    def leave(self) -> None:
        """Expect one trainer fewer."""
        with self.lock:
            self.expected -= 1
        self.complete()

    def complete(self) -> None:
        """Step and answer if all gradients have arrived."""
        with self.lock:
            if not self.grads or len(self.grads) < self.expected:
                return
            # a new tensor, since earlier answers may still refer to the old one
            self.weights = self.weights - 0.5 * torch.stack(self.grads).mean(0)
            self.updates += len(self.grads)
            answer, self.answer = self.answer, torch.futures.Future()
            self.grads = []
            weights = self.weights
        answer.set_result(weights)


def train(server: rpc.RRef, number: int, dies: bool) -> None:
    """Send gradients, and continue with the returned parameters; runs in a trainer."""
    images, classes = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    x, y = torch.cat([x, torch.ones(len(x), 1)], 1), torch.tensor(classes)
    weights = torch.zeros(65, 10)
    for step in range(STEPS):
        if dies and step == DIES_AT:
            os._exit(0)  # without a shutdown, as if it had been killed
        generator = torch.Generator().manual_seed(100 * number + step)
        rows = torch.randint(len(x), (BATCH,), generator=generator)
        leaf = weights.clone().requires_grad_()
        functional.cross_entropy(x[rows] @ leaf, y[rows]).backward()
        weights = server.rpc_sync().step(leaf.grad)
    if number == 0:
        right = ((x @ weights).argmax(1) == y).float().mean()
        print(f"after {STEPS} steps {right:.1%} right")


def serve(trainers: list[str]) -> None:
    """Run the trainers; stop waiting for a trainer that is lost."""
    server = Server(len(trainers))
    shared = rpc.RRef(server)
    calls = []
    for number, name in enumerate(trainers):
        args = (shared, number, number == len(trainers) - 1)
        call = rpc.rpc_async(name, train, args, timeout=0)
        calls.append(call.then(partial(finished, server, name)))
    torch.futures.wait_all(calls)
    print(f"{server.updates} gradients, none lost; trainers at the end: {server.expected}")


def finished(server: Server, name: str, call: torch.futures.Future[None]) -> None:
    """Handle the end of a trainer; if it is lost, the server continues without it."""
    try:
        call.value()
    except PeerLostError as exc:
        print(f"goes on without {name}: {exc}")
        server.leave()


if __name__ == "__main__":
    rpc.init_rpc()
    if rpc.own_role().name == "ps":
        serve(rpc.names_of("trainer"))
    rpc.shutdown()
