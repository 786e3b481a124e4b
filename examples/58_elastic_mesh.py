"""A pipeline with sharded optimizer states loses a rank, and continues as replicas, bit by bit.

    braid run -n 4 --min-ranks 3 --restarts 0 examples/58_elastic_mesh.py

Rank 1 dies in step 5. Other deaths can be passed as RANK:STEP. With `--min-ranks 4` and without
`--restarts 0`, the others wait for a new process, and the mesh does not change.
"""

import os
import signal
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import braid
from braid.programs.sampling import SampleOrder, SamplerState

SHARDS, SIZE, EPOCHS = 4, 8, 10  # micro-batches of a step, samples of a micro-batch
CHUNKS = 2  # parts of a micro-batch that are in the pipeline at the same time
DEATHS = sys.argv[1:] or ["1:5"]
X = torch.linspace(-3.0, 3.0, 640).sin().view(128, 5)
Y = X.sum(1, keepdim=True)


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return the same whole model on each rank, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def alone() -> nn.Module:
    """Train in one process in plain torch: gradients are added in the order of micro-batches."""
    model, optimizer = build()
    order = SampleOrder(num_samples=len(X), batch_size=SHARDS * SIZE)
    at = SamplerState()
    while at.epoch < EPOCHS:
        sums = [torch.full_like(param, -0.0) for param in model.parameters()]
        for shard in torch.tensor(order.batch(at)).split(SIZE):
            optimizer.zero_grad()
            for chunk in shard.split(SIZE // CHUNKS):
                (functional.mse_loss(model(X[chunk]), Y[chunk]) / CHUNKS).backward()
            sums = [total + p.grad for total, p in zip(sums, model.parameters(), strict=True)]
        for total, param in zip(sums, model.parameters(), strict=True):
            param.grad = total / SHARDS
        optimizer.step()
        at = order.after(at)
    return model


def main() -> None:
    """Train, and compare on rank 0 of the last members."""
    braid.init()
    loader = DataLoader(TensorDataset(X, Y), batch_size=SIZE, shuffle=True)
    with braid.elastic_mesh(
        build, "pp=2,dp=2", shard=1, shards=SHARDS, num_microbatches=CHUNKS
    ) as training:
        for _ in training.epochs(EPOCHS):
            for x, y in training.batches(loader):
                with training.step():
                    if f"{os.environ['RANK']}:{training.num_steps}" in DEATHS:
                        os.kill(os.getpid(), signal.SIGKILL)
                    loss = training.model.step(x, y, loss=functional.mse_loss)
                    training.add_loss(loss)
    training.model.make_whole()
    if braid.world().rank == 0:
        mesh, model = training.model.mesh, training.model.model
        print(f"{training.num_steps} steps, loss {training.loss:.6f}, the last mesh is {mesh}")
        pairs = zip(model.parameters(), alone().parameters(), strict=True)
        same = all(torch.equal(p, q) for p, q in pairs)
        print("parameters equal one process bit by bit" if same else "parameters differ")


main()
