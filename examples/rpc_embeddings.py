"""An embedding table on a server, and data parallel dense layers on the trainers.

    braid run --role ps:1 --role trainer:2 examples/rpc_embeddings.py

Each trainer looks up its samples in the server's table, a remote module, and has a replica of the
dense layers. Within a context of distributed autograd, gradients of the dense layers are averaged
over the trainers. Gradients of the table stay on the server, and each trainer steps with its own.
The server also trains the same model alone, and compares both.
"""

from __future__ import annotations

import functools

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import braid
from braid import rpc
from braid.rpc import dist_autograd

STEPS, BATCH, SIZE, LR = 100, 128, 24, 0.5
LEVELS = 17  # values of a pixel; a pixel with its value is a row of the table


def table() -> nn.EmbeddingBag:
    """Return the table, with the same values in every process."""
    weight = 0.1 * torch.randn(64 * LEVELS, SIZE, generator=torch.Generator().manual_seed(1))
    return nn.EmbeddingBag.from_pretrained(weight.double(), freeze=False, mode="sum")


def dense() -> nn.Sequential:
    """Return the dense layers."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(SIZE, 64), nn.ReLU(), nn.Linear(64, 10)).double()


@functools.cache
def trainers() -> braid.Group | None:
    """Return the group of the trainers, or None in the server; every rank must call it."""
    return braid.init().split(0 if rpc.own_role().name == "trainer" else None)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return rows of the table and classes for each step."""
    images, classes = load_digits(return_X_y=True)
    ids = torch.tensor(images).long() + LEVELS * torch.arange(64)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(ids), (STEPS, BATCH), generator=generator)
    return [(ids[samples], torch.tensor(classes)[samples]) for samples in rows]


def train(embedding: rpc.RemoteModule) -> tuple[int, list[torch.Tensor]]:
    """Train on a part of each batch; return the dense parameters. Runs in a trainer."""
    group, role = trainers(), rpc.own_role()
    ddp = braid.DistributedDataParallel(dense(), process_group=group)
    groups = [
        {"params": [rpc.RRef(p) for p in ddp.parameters()]},  # averaged gradients
        {"params": embedding.remote_parameters(), "lr": LR / role.size},  # each trainer's own
    ]
    optimizer = rpc.DistributedOptimizer(torch.optim.SGD, groups, lr=LR)
    for ids, classes in batches():
        mine = slice(role.number, None, role.size)
        with dist_autograd.context() as context:
            loss = functional.cross_entropy(ddp(embedding(ids[mine])), classes[mine])
            dist_autograd.backward(context, [loss])  # averages over the trainers
            assert all(p.grad is None for p in ddp.parameters()), "gradients are in the context"
            optimizer.step(context)
        group.barrier()  # the next look-up sees the steps of all trainers
    return role.number, [p.detach() for p in ddp.parameters()]


def alone() -> tuple[nn.EmbeddingBag, nn.Sequential, float]:
    """Train the same model in one process; return it and the accuracy on the last batch."""
    embedding, layers = table(), dense()
    params = [*embedding.parameters(), *layers.parameters()]
    optimizer = torch.optim.SGD(params, lr=LR)
    for ids, classes in batches():
        optimizer.zero_grad()
        scores = layers(embedding(ids))
        functional.cross_entropy(scores, classes).backward()
        optimizer.step()
    return embedding, layers, (scores.argmax(1) == classes).double().mean().item()


def serve(names: list[str]) -> None:
    """Run all trainers at the same time, and compare with one process."""
    shared = rpc.RRef(table())
    embedding = rpc.RemoteModule.init_from_module_rref(rpc.own_role().node, shared)
    results = rpc.broadcast(names, train, (embedding,))
    expected, layers, right = alone()
    pairs = [(shared.local_value().weight, expected.weight)]
    for _, params in results:
        pairs += zip(params, layers.parameters(), strict=True)
    same = all(torch.allclose(a, b, rtol=0, atol=1e-11) for a, b in pairs)
    print(f"{right:.1%} of the last batch right; values equal one process: {same}")


if __name__ == "__main__":
    trainers()
    rpc.init_rpc()
    if rpc.own_role().name == "ps":
        serve(rpc.names_of("trainer"))
    rpc.shutdown()
