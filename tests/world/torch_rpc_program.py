"""A program for torch's RPC: a parameter server, an RNN in two parts, and a remote module that travels.

    python torch_rpc_program.py

The process that the user starts is node 0; it spawns two others, as torch's tutorials do.
"""

from __future__ import annotations

import os
import threading

import torch
from torch import nn

from braid.compat.torch_rpc import DistributedOptimizer, RemoteModule, dist_autograd, rpc

NUM_NODES = 3


class ParameterServer:
    """Averages the gradients of all trainers, then steps."""

    def __init__(self, num_trainers: int) -> None:
        self.model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(self.model.weight)
        self.lock = threading.Lock()
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.num_trainers, self.count = num_trainers, 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    @staticmethod
    @rpc.functions.async_execution
    def update(
        own: rpc.RRef[ParameterServer], grad: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Take a gradient; the answer leaves when all have come."""
        self = own.local_value()
        with self.lock:
            weight = self.model.weight
            weight.grad = grad / self.num_trainers + (0 if weight.grad is None else weight.grad)
            self.count += 1
            future = self.future
            if self.count == self.num_trainers:
                self.count, self.future = 0, torch.futures.Future()
                self.optimizer.step()
                self.optimizer.zero_grad()
                future.set_result(weight.detach().clone())
        return future


def train(server: rpc.RRef[ParameterServer], grad: float) -> list[float]:
    """Send gradients of a trainer; return the weights after two steps."""
    for _ in range(2):
        weight = rpc.rpc_sync(
            server.owner(), ParameterServer.update, args=(server, torch.full((1, 3), grad))
        )
    return weight.flatten().tolist()


class Recurrent(nn.Module):
    """A recurrent layer whose output layer lives in another node."""

    def __init__(self, there: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.cell = nn.RNN(2, 4)
        self.decoder = rpc.remote(there, decoder)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.cell(x)
        return self.decoder.rpc_sync().forward(hidden)

    def references(self) -> list[rpc.RRef[nn.Parameter]]:
        """Return references to all parameters."""
        theirs = rpc.rpc_sync(self.decoder.owner(), parameters, args=(self.decoder,))
        return [*(rpc.RRef(each) for each in self.cell.parameters()), *theirs]


def decoder() -> nn.Linear:
    """Return the output layer; the same one in any process."""
    torch.manual_seed(2)
    return nn.Linear(4, 1)


def parameters(rref: rpc.RRef[nn.Module]) -> list[rpc.RRef[nn.Parameter]]:
    """Return references to the parameters of a module; in its node."""
    return [rpc.RRef(each) for each in rref.local_value().parameters()]


def apply(module: RemoteModule, x: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Use a remote module that came as an argument."""
    return module(x), str(module.on)


def weights_after(net: Recurrent, x: torch.Tensor) -> list[torch.Tensor]:
    """Train over two nodes; return all parameters."""
    references = net.references()
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.1)
    for _ in range(3):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [net(x).square().sum()])
            optimizer.step(context_id)
    return [each.to_here() for each in references]


def weights_alone(x: torch.Tensor) -> list[torch.Tensor]:
    """Train the same network in one process."""
    torch.manual_seed(1)
    cell, last = nn.RNN(2, 4), decoder()
    params = [*cell.parameters(), *last.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        last(cell(x)[0]).square().sum().backward()
        optimizer.step()
    return params


def main() -> None:
    """Act as node 0."""
    server = rpc.remote("worker1", ParameterServer, args=(2,))
    futures = [rpc.rpc_async(f"worker{rank}", train, args=(server, float(rank))) for rank in (1, 2)]
    print("weights", [each.wait() for each in futures])

    x = torch.linspace(-1, 1, 12).view(3, 2, 2)
    pairs = zip(weights_after(Recurrent("worker2"), x), weights_alone(x), strict=True)
    print("same", all(torch.allclose(a, b, atol=1e-6) for a, b in pairs))

    module = RemoteModule("worker1/cpu", nn.Linear, args=(4, 2))
    with dist_autograd.context() as context_id:
        y, on = rpc.rpc_sync("worker2", apply, args=(module, torch.ones(1, 4)))
        dist_autograd.backward(context_id, [y.sum()])
        known = dist_autograd._retrieve_context(context_id)._known_worker_ids()
    print("module", torch.equal(y, module.forward_async(torch.ones(1, 4)).wait()), on, known)
    print("open", dist_autograd._get_debug_info()["num_autograd_contexts"])


def run(rank: int) -> None:
    """Be a node."""
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, init_method="env://")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=NUM_NODES, rpc_backend_options=options)
    if rank == 0:
        main()
    rpc.shutdown()


def spawned(place: int) -> None:
    """Be one of the nodes that node 0 has spawned."""
    run(place + 1)


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    others = torch.multiprocessing.spawn(spawned, nprocs=NUM_NODES - 1, join=False)
    run(0)
    others.join()
