"""Model parallel by hand: the first layers on rank 0, the last layers on rank 1.

braid run -n 2 examples/four_ways/placed.py

The shares of a step run in turn, so gradients are added in the same order as in data parallel
training.
"""

from __future__ import annotations

import torch
from job import LEARNING_RATE, STEPS, digest, loss_of, new_layers, share

import braid

torch.set_num_threads(1)
group = braid.init()
assert group.size == 2, "two ranks, one for each part"
first = group.rank == 0
layer = new_layers()[group.rank]
optimizer = torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE)
between = torch.empty(16, 32)  # receives the activations, or their gradient
for step in range(STEPS):
    optimizer.zero_grad()
    for rank in range(group.size):
        x, target = share(rank, step)
        if first:
            hidden = layer(x)
            group.send(hidden.detach(), 1)
            group.recv(between, 1)
            hidden.backward(between)
        else:
            group.recv(between, 0)
            hidden = between.clone().requires_grad_()
            loss_of(layer(hidden), target).backward()
            group.send(hidden.grad, 0)
    for param in layer.parameters():
        param.grad /= group.size
    optimizer.step()

# the first rank collects the other's weights
params = list(layer.parameters())
if first:
    shapes = [param.shape for param in new_layers()[1].parameters()]
    others = [group.recv(torch.empty(shape), 1) for shape in shapes]
    print(digest([*params, *others]))
else:
    for param in params:
        group.send(param.detach(), 0)
