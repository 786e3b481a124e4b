"""Training loses a rank, continues without it, and ends with the bits of one process.

    braid run -n 3 --min-ranks 2 examples/57_elastic.py

Rank 1 dies in step 5. Other deaths can be passed as RANK:STEP, such as `1:5 0:20`. A process that
replaces a dead one has a new number, so it does not die again.
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

SHARDS, SIZE, EPOCHS = 3, 8, 10  # micro-batches of a step, samples of a micro-batch
DEATHS = sys.argv[1:] or ["1:5"]
X = torch.linspace(-3.0, 3.0, 480).sin().view(96, 5)
Y = X.sum(1, keepdim=True)


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same model in each process, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def die_if_due(step: int) -> None:
    """Kill this process if its death is listed for the step."""
    if f"{os.environ.get('RANK')}:{step}" in DEATHS:
        os.kill(os.getpid(), signal.SIGKILL)


def alone() -> nn.Module:
    """Train in one process in plain torch: micro-batches in order, and their sum in order."""
    model, optimizer = new_model()
    order = SampleOrder(num_samples=len(X), batch_size=SHARDS * SIZE)
    at = SamplerState()
    while at.epoch < EPOCHS:
        for shard in torch.tensor(order.batch(at)).split(SIZE):
            functional.mse_loss(model(X[shard]), Y[shard]).backward()  # adds to .grad
        for param in model.parameters():
            param.grad.mul_(1 / SHARDS)
        optimizer.step()
        optimizer.zero_grad()
        at = order.after(at)
    return model


def main() -> None:
    """Train, and compare on rank 0 of the last members."""
    braid.init()
    model, optimizer = new_model()
    loader = DataLoader(TensorDataset(X, Y), batch_size=SIZE, shuffle=True)
    with braid.elastic(model, optimizer, shards=SHARDS) as training:
        for _ in training.epochs(EPOCHS):
            for x, y in training.batches(loader):
                with training.step():
                    die_if_due(training.num_steps)
                    functional.mse_loss(model(x), y).backward()
    if braid.world().rank == 0:
        loss = functional.mse_loss(model(X), Y).item()
        print(f"{training.num_steps} steps, loss {loss:.6f}, {braid.world().size} ranks at the end")
        pairs = zip(model.parameters(), alone().parameters(), strict=True)
        same = all(torch.equal(p, q) for p, q in pairs)
        print("parameters equal one process bit by bit" if same else "parameters differ")


main()
