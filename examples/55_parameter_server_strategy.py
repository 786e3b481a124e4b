"""Variables in shards on two servers; two workers run the loop on their shares of a batch.

    braid run --servers 2 --workers 2 examples/55_parameter_server_strategy.py

Weights are divided into shards of rows, which are placed on the servers in turn. The embedding is
sparse, so a step pulls and pushes only the rows of its batch. Training is bulk synchronous here, so
its parameters equal one process; without `consistency` it is asynchronous.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from braid.ps import BSP
from braid.strategies.parameter_server import FixedShardsPartitioner, ParameterServerStrategy

STEPS, WORKERS, WORDS = 20, 2, 50


class Net(nn.Module):
    """An embedding, a layer with 13 rows, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, sparse=True)
        self.layer = nn.Linear(4, 13)
        self.head = nn.Linear(13, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a number for each word."""
        return self.head(torch.tanh(self.layer(self.words(ids))))[:, 0]


def new_model() -> Net:
    """Return the same model in each process."""
    torch.manual_seed(0)
    return Net()


def shares(step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the share of each worker: distinct words, and their targets."""
    generator = torch.Generator().manual_seed(step)
    for ids in torch.randperm(WORDS, generator=generator)[: 10 * WORKERS].chunk(WORKERS):
        yield ids, ids / WORDS


def alone() -> Net:
    """Train in one process with the mean of the workers' gradients."""
    net = new_model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        sgd.zero_grad()
        for ids, y in shares(step):
            (functional.mse_loss(net(ids), y) / WORKERS).backward()
        sgd.step()
    return net


strategy = ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(5), consistency=BSP)
with strategy.scope():
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(ids: torch.Tensor, y: torch.Tensor) -> float:
    """Train one step; the step of the optimizer pushes the gradients."""
    optimizer.zero_grad()
    loss = functional.mse_loss(model(ids), y)
    loss.backward()
    optimizer.step()
    return loss.item()


if strategy.serves:
    strategy.serve()
else:
    worker = strategy.node.number
    for step in range(STEPS):
        loss = strategy.run(train, list(shares(step))[worker])
    strategy.variables.pull_all()
    print("shards of layer.weight lie on servers", strategy.variables.servers_of("layer.weight"))
    pairs = zip(model.parameters(), alone().parameters(), strict=True)
    same = all(torch.equal(p, q) for p, q in pairs)
    print(f"loss {loss:.3f} after {STEPS} steps of worker {worker}")
    print("parameters equal one process bit by bit" if same else "parameters differ")
    strategy.close()
