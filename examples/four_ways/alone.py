"""The reference: one process adds the gradients of all shares, and divides the sum.

braid run -n 1 examples/four_ways/alone.py
"""

from __future__ import annotations

import torch
from job import LEARNING_RATE, STEPS, digest, loss_of, new_layers, share
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(*new_layers())
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
for step in range(STEPS):
    optimizer.zero_grad()
    for rank in range(2):
        x, target = share(rank, step)
        loss_of(model(x), target).backward()
    for param in model.parameters():
        param.grad /= 2
    optimizer.step()
print(digest(list(model.parameters())))
