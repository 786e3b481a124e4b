"""Data parallel by hand: one collective per gradient.

braid run -n 2 examples/four_ways/by_hand.py
"""

from __future__ import annotations

import torch
from job import LEARNING_RATE, STEPS, digest, loss_of, new_layers, share
from torch import nn

import braid

torch.set_num_threads(1)
group = braid.init()
model = nn.Sequential(*new_layers())
for param in model.parameters():
    group.broadcast(param.detach(), 0)
for step in range(STEPS):
    x, target = share(group.rank, step)
    model.zero_grad()
    loss_of(model(x), target).backward()
    for param in model.parameters():
        group.all_reduce(param.grad, "avg")
        with torch.no_grad():
            param.add_(param.grad, alpha=-LEARNING_RATE)
if group.rank == 0:
    print(digest(list(model.parameters())))
