"""A training on a mesh for tests: prints a digest of its state, and kills itself where told to.

Arguments: the mesh, the stage of sharding, and deaths as RANK:STEP, in the loss of that step;
`RANK:STEP:PID` kills another process first. SAVES names a directory for checkpoints.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import braid


class Layers(nn.Module):
    """Layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(
            [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)]
        )


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Layers()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def main() -> None:
    mesh, shard, *deaths = sys.argv[1:]
    braid.init()
    number = os.environ["RANK"]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for rank, step, *pids in (death.split(":") for death in deaths):
            if (rank, step) == (number, str(training.num_steps)):
                for pid in [*map(int, pids), os.getpid()]:
                    os.kill(pid, signal.SIGKILL)
        return functional.mse_loss(output, target)

    x = torch.linspace(-2.0, 2.0, 768).sin().view(96, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    saves = os.environ.get("SAVES", "")
    with braid.elastic_mesh(
        build,
        mesh,
        layers=lambda model: list(model.rows),
        shards=4,
        clip=1.0,
        shard=int(shard),
        num_microbatches=2,
        checkpoints=saves,
        checkpoint_every=100 * bool(saves),
    ) as training:
        for _ in training.epochs(2):
            for inputs, target in training.batches(loader):
                with training.step():
                    training.model.step(inputs, target, loss=loss)
    training.model.make_whole()
    tensors = training.model.model.state_dict().values()
    state = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    print(f"{training.num_steps} {hashlib.sha256(state).hexdigest()}", flush=True)


main()
