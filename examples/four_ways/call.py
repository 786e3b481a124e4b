"""Data parallel by a call: `braid.fit` runs the loop, and divides each batch into shares.

braid run -n 2 examples/four_ways/call.py
"""

from __future__ import annotations

import torch
from job import LEARNING_RATE, STEPS, digest, loss_of, new_layers, share
from torch import nn

import braid
from braid.strategies import MultiWorkerMirroredStrategy

torch.set_num_threads(1)
strategy = MultiWorkerMirroredStrategy()
model = nn.Sequential(*new_layers())
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
pairs = [[share(rank, step) for rank in range(2)] for step in range(STEPS)]
batches = [tuple(map(torch.cat, zip(*pair, strict=True))) for pair in pairs]
braid.fit(model, batches, optimizer=optimizer, loss=loss_of, strategy=strategy)
if strategy.cluster_resolver.task_id == 0:
    print(digest(list(model.parameters())))
