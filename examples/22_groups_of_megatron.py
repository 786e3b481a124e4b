"""Megatron's groups, their best order on hosts, and training along two of its axes.

braid run -n 4 examples/22_groups_of_megatron.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import braid
from braid.parallel.tensor_parallel import slicing_of
from braid.programs.layout import Grid, Mesh, place
from braid.programs.topology import Cluster, Level

WIDTH, ROWS, STEPS, LR = 32, 16, 3, 0.1
HOSTS = Cluster(  # two hosts of two ranks; real ones are measured by `braid probe`
    [
        Level(name="host", size=2, latency_s=2e-6, bytes_per_s=450e9),
        Level(name="rack", size=2, latency_s=5e-6, bytes_per_s=50e9),
    ]
)


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, replica: int, replicas: int, average: braid.Group | None) -> None:
    """Take gradient descent steps on a share of each batch; average gradients over replicas."""
    for step in range(STEPS):
        x = batch(step)[replica::replicas]
        model.zero_grad()
        functional.mse_loss(model(x), x).backward()
        for param in model.parameters():
            grad = param.grad if average is None else average.all_reduce(param.grad, op="avg")
            param.data -= LR * grad


def main() -> None:
    group = braid.init()
    placement = place(Mesh({"tp": 2, "dp": 2}), HOSTS)
    grid = Grid(placement.mesh.axes, placement.order)
    mesh = braid.mesh(str(placement.mesh), group)
    assert list(mesh["tp"].ranks) == grid.group_of("tp", group.rank)
    if group.rank == 0:
        print(placement)
        print(f"order {placement.order}: tp {grid.groups('tp')}, dp {grid.groups('dp')}")

    model = new_model()
    braid.parallelize(model, mesh["tp"], {"0": "column", "2": "row"})
    train(model, mesh.coordinates["dp"], 2, mesh["dp"])
    whole = new_model()
    train(whole, 0, 1, None)
    for shard, param in zip(model.parameters(), whole.parameters(), strict=True):
        slicing = slicing_of(shard)
        part = slicing.part_of(param, mesh["tp"].rank, 2) if slicing else param
        assert (shard - part).abs().max() < 1e-6 * param.abs().max()
        replicas = mesh["dp"].all_gather(shard.detach().reshape(1, -1))
        assert torch.equal(replicas[0], replicas[1])
    if group.rank == 0:
        print("weights equal one process up to rounding; replicas agree bit by bit")


if __name__ == "__main__":
    main()
