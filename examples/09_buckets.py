"""Rebuilt buckets, an unused layer and uneven inputs, compared with one process.

braid run -n 2 examples/09_buckets.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import braid
from braid.parallel.data_parallel import accumulate

LEVELS, WIDTH = 3, 64
CAP_MB = 2 * WIDTH * (WIDTH + 1) * 4 / (1 << 20)  # two layers in a bucket
BATCHES = (4, 3)  # of rank 0 and of rank 1


class Levels(nn.Module):
    """Levels with a layer down and a layer up; forward runs all layers down, then all layers up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(WIDTH, WIDTH) for _ in range(2 * LEVELS))
        pairs = zip(layers, layers, strict=True)
        self.levels = nn.ModuleList(nn.ModuleDict({"down": a, "up": b}) for a, b in pairs)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102 - torch's
        for level in self.levels:
            x = level["down"](x).tanh()
        for level in reversed(self.levels):
            x = level["up"](x).tanh()
        return x


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x) - x).square().mean()


def contents(model: braid.DistributedDataParallel) -> str:
    """Return the layers of each bucket; every rank must call it."""
    rows = model.bucket_times().rows
    layers = [dict.fromkeys(name.rpartition(".")[0] for name in row.names) for row in rows]
    return " | ".join(map(", ".join, layers)).replace("levels.", "")


def main() -> None:
    torch.set_num_threads(1)
    group = braid.init()
    options = {"bucket_cap_mb": CAP_MB, "find_unused_parameters": True}
    model = braid.DistributedDataParallel(Levels(), process_group=group, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = contents(model)
    with model.join(divide_by_initial_world_size=False):
        for step in range(BATCHES[group.rank]):
            optimizer.zero_grad()
            loss_of(model, group.rank, step).backward()
            optimizer.step()
    after = contents(model)

    alone = Levels()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(max(BATCHES)):
        having = [rank for rank in range(2) if step < BATCHES[rank]]
        accumulate(alone, [partial(loss_of, alone, rank, step) for rank in having])
        optimizer.step()
    assert all(map(torch.equal, model.module.parameters(), alone.parameters()))
    if group.rank == 0:
        print(f"buckets at first  {before}\nbuckets later     {after}")
        print("two ranks with 4 and 3 batches have the weights of one process, bit by bit")


if __name__ == "__main__":
    main()
