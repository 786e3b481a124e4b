"""Data parallel by a wrapped optimizer, without a change of the model.

braid run -n 2 examples/four_ways/optimizer.py
"""

from __future__ import annotations

import torch
from job import LEARNING_RATE, STEPS, digest, loss_of, new_layers, share
from torch import nn

import braid
from braid.parallel.data_parallel import AveragingOptimizer

torch.set_num_threads(1)
group = braid.init()
model = nn.Sequential(*new_layers())
optimizer = AveragingOptimizer(
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
    model.named_parameters(),
    process_group=group,
)
for step in range(STEPS):
    x, target = share(group.rank, step)
    optimizer.zero_grad()
    loss_of(model(x), target).backward()
    optimizer.step()
if group.rank == 0:
    print(digest(list(model.parameters())))
