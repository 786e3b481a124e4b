"""When the optimizer steps: after averaging, inside backward, or before a later averaging.

braid run -n 2 examples/11_optimizers.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import braid
from braid.parallel import data_parallel as dp

STEPS, PERIOD, RANKS = 8, 4, range(2)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))


def loss_of(model: nn.Module, rank: int, *steps: int) -> torch.Tensor:
    seeds = [100 * step + rank for step in steps]
    xs = [torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return sum((model(x) - x).square().mean() for x in xs)


def averaged(group: braid.Group, *, inside: bool) -> list[nn.Module]:
    period, max_norm = (1, float("inf")) if inside else (2, 0.5)
    options = {"process_group": group, "gradient_accumulation_steps": period}
    model, alone = braid.DistributedDataParallel(new_model(), **options), new_model()
    optimizers = {net: dp.LAMB(net.parameters(), lr=0.01) for net in (model, alone)}
    if inside:  # backward takes the steps: the loop calls no step()
        model.step_in_backward(lambda params: dp.LAMB(params, lr=0.01))
        del optimizers[model]
    for first in range(0, STEPS, period):
        steps = range(first, first + period)
        for step in steps:
            loss_of(model, group.rank, step).backward()  # the last backward averages the sum
        dp.accumulate(alone, [partial(loss_of, alone, rank, *steps) for rank in RANKS])
        for net, optimizer in optimizers.items():
            dp.clip_grad_norm_(net.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return [model.module, alone]


def averaging_later(group: braid.Group) -> list[nn.Module]:
    models = [new_model() for _ in (group.rank, *RANKS)]  # this rank's model, then references
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    averager = dp.PeriodicModelAverager(PERIOD, warmup_steps=PERIOD - 1, process_group=group)
    optimizers[0] = dp.PostLocalSGDOptimizer(optimizers[0], averager)
    for step in range(STEPS):
        for model, optimizer, rank in zip(models, optimizers, (group.rank, *RANKS), strict=True):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        if (step + 1) % PERIOD == 0:
            vectors = [nn.utils.parameters_to_vector(model.parameters()) for model in models[1:]]
            for model in models[1:]:
                nn.utils.vector_to_parameters(sum(vectors).detach() / 2, model.parameters())
    return models


def main() -> None:
    torch.set_num_threads(1)
    group = braid.init()
    ways = (averaged(group, inside=False), averaged(group, inside=True), averaging_later(group))
    names = ("after averaging", "inside backward", "averaging later")
    for name, models in zip(names, ways, strict=True):
        first, *others = [list(model.parameters()) for model in models]
        assert all(all(map(torch.equal, first, other)) for other in others)
        if group.rank == 0:
            print(f"{name}: the weights of one process, bit by bit")


if __name__ == "__main__":
    main()
