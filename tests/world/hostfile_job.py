"""An elastic training for tests that changes its hosts through a file: FILE NUMBER:LINES ...

Rank 0 writes the lines after a pass over the data, and the next ones once the run has this number
of ranks.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import braid

NUM_LOOKS = 400
braid.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(36, 8)), batch_size=4)
goal, changes = braid.world().size, sys.argv[2:]
with braid.elastic(model, optimizer, shards=3) as training:
    for _ in training.epochs(5):
        for (x,) in training.batches(loader):
            with training.step():
                model(x).square().mean().backward()
        if os.environ["RANK"] != "0":
            continue
        if braid.world().size == goal and changes:
            number, _, text = changes.pop(0).partition(":")
            goal = int(number)
            Path(sys.argv[1]).write_text(text)
        for _ in range(NUM_LOOKS):  # a rank that was asked to leave needs another step
            if braid.world().size == goal or training._members.pauses:
                break  # the launcher knows the change, and ranks are ready
            time.sleep(0.02)
print(braid.world().size, training.num_steps, model.weight.detach().numpy().tobytes().hex())
