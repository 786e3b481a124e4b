"""Data parallel training in a few lines, compared with one process.

braid run -n 2 examples/02_data_parallel.py
"""

from __future__ import annotations

import torch
from torch import nn

import braid
from braid.parallel.data_parallel import accumulate

STEPS = 20


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss on the samples of `rank` in this step."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def main() -> None:
    torch.set_num_threads(1)
    group = braid.init()
    model = new_model()
    replica = braid.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=0.01)
    for step in range(STEPS):
        loss_of(replica, group.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    alone = new_model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for step in range(STEPS):
        accumulate(
            alone,
            [lambda rank=rank, step=step: loss_of(alone, rank, step) for rank in range(group.size)],
        )
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), alone.parameters()))
    if group.rank == 0:
        print(f"{group.size} ranks have the weights of one process, bit by bit")


if __name__ == "__main__":
    main()
