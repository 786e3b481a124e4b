"""Parts of a model on named devices of three tasks; the master runs the steps.

    braid run -n 3 examples/53_placed.py

The encoder and the head are on task 1, the layers between them on task 2, so a step sends
activations twice and gradients twice. The master also trains the same model alone.
"""

import os
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from braid import rpc
from braid.strategies import placed

STEPS = 10


class Net(nn.Module):
    """A residual network; its forward names the device of the middle layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.middle = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = torch.tanh(self.encoder(x))
        with placed.device("/job:worker/task:2"):
            for layer in self.middle:
                x = x + torch.tanh(layer(x))
        return self.head(x)


def make() -> tuple[nn.Module, torch.Tensor]:
    """Return the model and an example input; each task calls it."""
    torch.manual_seed(0)
    return Net(), torch.randn(8, 16)


def train() -> None:
    """Train the placed model, and the same model in this process."""
    alone, _ = make()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    devices = {"encoder": "/task:1", "tanh at 1": "/task:1", "head": "/task:1"}
    with placed.place(make, devices=devices) as program:
        program.optimizer(torch.optim.SGD, lr=0.1)
        print(program)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(8, 16, generator=generator)
            target = torch.randint(0, 4, (8,), generator=generator)
            loss = program.step(x, target, loss=functional.cross_entropy)
            optimizer.zero_grad()
            functional.cross_entropy(alone(x), target).backward()
            optimizer.step()
        state = program.state_dict()
        picture = Path(tempfile.mkdtemp()) / "step.svg"
        program.timeline().save(picture)
    same = all(torch.equal(state[name], x) for name, x in alone.state_dict().items())
    print(f"loss {loss:.3f} after {STEPS} steps; its last step is drawn in {picture}")
    print("parameters equal one process bit by bit" if same else "parameters differ")


rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker:{rank}")
if rank == 0:
    train()
rpc.shutdown()
