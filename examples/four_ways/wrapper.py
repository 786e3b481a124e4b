"""Data parallel by one line: the model is wrapped in DistributedDataParallel.

braid run -n 2 examples/four_ways/wrapper.py
"""

from __future__ import annotations

import torch
from job import LEARNING_RATE, STEPS, digest, loss_of, new_layers, share
from torch import nn

import braid

torch.set_num_threads(1)
group = braid.init()
model = braid.DistributedDataParallel(nn.Sequential(*new_layers()), process_group=group)
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
for step in range(STEPS):
    x, target = share(group.rank, step)
    optimizer.zero_grad()
    loss_of(model(x), target).backward()
    optimizer.step()
if group.rank == 0:
    print(digest(list(model.parameters())))
