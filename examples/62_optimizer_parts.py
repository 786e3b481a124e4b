"""Groups, gradients and state of an optimizer on each rank: replicated, and sharded.

braid run -n 2 examples/62_optimizer_parts.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import braid
from braid.parallel import data_parallel as dp
from braid.parallel.sharding import shard_optimizer

STEPS, RANKS = 6, range(2)
WAYS = {"one process": 0, "replicated": 0, "sharded, stage 1": 1, "sharded, stage 2": 2}


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank))
    return (model(x) - x).square().mean()


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, biases do not: two groups with their own numbers."""
    weights = [param for param in model.parameters() if param.ndim > 1]
    biases = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def parts_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the number of elements of each group, and of the tensors in the state."""
    groups = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    tensors = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    rates = {group["lr"] for group in optimizer.param_groups}
    return f"groups of {groups} elements, state of {sum(map(torch.numel, tensors))}, lr {rates}"


def train(group: braid.Group, way: str) -> tuple[nn.Module, str]:
    model = net = new_model()
    optimizer = new_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    zero_grad = optimizer.zero_grad
    if way == "replicated":
        net = braid.DistributedDataParallel(model, process_group=group)
    elif stage := WAYS[way]:
        sharding = shard_optimizer(optimizer, model, stage=stage, process_group=group)
        zero_grad = sharding.zero_grad
    for step in range(STEPS):
        zero_grad()
        if way == "one process":
            dp.accumulate(model, [partial(loss_of, model, rank, step) for rank in RANKS])
        else:
            loss_of(net, group.rank, step).backward()
        optimizer.step()  # changes parameters and state
        scheduler.step()  # changes groups, on each rank alike
    return model, parts_of(optimizer)


def main() -> None:
    group = braid.init()
    trained = {way: train(group, way) for way in WAYS}
    for way, (model, parts) in trained.items():
        if group.rank == 0:
            print(f"{way:18}{parts}")
        assert all(map(torch.equal, model.parameters(), trained["one process"][0].parameters()))
    if group.rank == 0:
        print("all ways have the parameters of one process, bit by bit")


if __name__ == "__main__":
    main()
