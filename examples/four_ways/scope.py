"""Data parallel by a scope: each replica gets a copy of the model that is created inside.

braid run -n 2 examples/four_ways/scope.py
"""

from __future__ import annotations

import torch
from job import LEARNING_RATE, STEPS, digest, loss_of, new_layers, share
from torch import nn

from braid.strategies import MultiWorkerMirroredStrategy, get_replica_context

torch.set_num_threads(1)
strategy = MultiWorkerMirroredStrategy()
with strategy.scope():
    model = nn.Sequential(*new_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def train(step: int) -> None:
    x, target = share(get_replica_context().replica_id_in_sync_group, step)
    optimizer.zero_grad()
    loss_of(model(x), target).backward()
    optimizer.step()


for step in range(STEPS):
    strategy.run(train, args=(step,))
if strategy.cluster_resolver.task_id == 0:
    print(digest(list(model.parameters())))
