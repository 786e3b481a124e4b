"""An elastic training for tests that changes its hosts through a file: FILE MESH NUMBER:LINES ...

Rank 0 writes the lines after a pass over the data, and the next ones once the run has this number
of ranks. Without a mesh (""), ranks have the whole model.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import braid

NUM_LOOKS = 400


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def loss(output: Tensor, _target: object = None) -> Tensor:
    return output.square().mean()


braid.init()
file, mesh, *changes = sys.argv[1:]
goal = braid.world().size
if mesh:
    begin = braid.elastic_mesh(build, mesh, shards=3, shard=1)
else:
    begin = braid.elastic(*build(), shards=3)
loader = DataLoader(TensorDataset(torch.linspace(-2, 2, 288).sin().view(36, 8)), batch_size=4)
with begin as training:
    for _ in training.epochs(5):
        for (x,) in training.batches(loader):
            with training.step():
                if mesh:
                    training.model.step(x, x, loss=loss)
                else:
                    loss(training.model(x)).backward()
        if os.environ["RANK"] != "0":
            continue
        if braid.world().size == goal and changes:
            number, _, text = changes.pop(0).partition(":")
            goal = int(number)
            Path(file).write_text(text)
        for _ in range(NUM_LOOKS):  # a rank that was asked to leave needs another step
            if braid.world().size == goal or training._members.pauses:
                break  # the launcher knows the change, and ranks are ready
            time.sleep(0.02)
    model = training.model
    if mesh:
        model.make_whole()
        model = model.model
weights = nn.utils.parameters_to_vector(model.parameters())
print(braid.world().size, training.num_steps, weights.detach().numpy().tobytes().hex())
