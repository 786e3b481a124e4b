"""The fastest split of a model on fast and on slow links, and one step with each split.

braid run -n 2 examples/48_choosing_a_strategy.py
"""

from __future__ import annotations

import torch
from torch import nn

import braid
from braid.parallel.hybrid import HybridParallel
from braid.plan.described import DescribedMachines, DescribedModel, count_operations
from braid.plan.search import Split, Training, find_splits
from braid.programs.topology import Device, Efficiency, flat

WIDTH, LAYERS, BATCH = 256, 8, 16
LINKS = {"fast links": 1e11, "slow links": 1e8}  # bytes per second
NOTHING = Efficiency(operation_s=1e-6, message_s=0.0, transfer_s=0.0)
TOY = Device(
    name="toy", flops_per_s={"fp32": 1e11}, bytes_per_s=1e11, memory_bytes=1e9, overlap=0.0,
    efficiency=NOTHING,
)  # fmt: skip


def model() -> nn.Sequential:
    """Return the same model on every rank."""
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.normal_(0.0, 0.05, generator=generator)
            layer.bias.zero_()
    return nn.Sequential(*layers)


def chosen(bytes_per_s: float) -> Split:
    """Return the fastest split over two ranks that are joined by a link of this bandwidth."""
    named = [(str(i), layer) for i, layer in enumerate(model())]
    operations = count_operations(named, lambda rows: torch.ones(rows, WIDTH))
    costs = DescribedModel("toy", {1: operations}, TOY, "fp32")
    ranking = find_splits(
        costs,
        DescribedMachines(flat(2, 1e-6, bytes_per_s), TOY),
        Training(BATCH),
        schedules=("1f1b",),
    )
    return ranking.best.split


def gradients(split: Split, group: braid.Group) -> list[torch.Tensor]:
    """Return the gradients of one step, including the gradients of other stages."""
    whole = model()
    hybrid = HybridParallel(
        whole, f"pp={split.pp},dp={split.dp}", group, num_microbatches=split.microbatches
    )
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    rows = BATCH // split.dp
    mine = x[rows * hybrid.place["dp"] :][:rows]
    hybrid.step(mine, mine.roll(1, 1), loss=nn.functional.mse_loss)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in whole.parameters()]
    return [hybrid.groups["pp"].all_reduce(grad) for grad in grads]


group = braid.init()
torch.set_num_threads(1)
for name, bytes_per_s in LINKS.items():
    split = chosen(bytes_per_s)
    alone = group.split(group.rank)
    assert alone is not None
    # one process adds the same parts in the same order
    parts = Split(microbatches=split.dp * split.microbatches)
    one = gradients(parts, alone)
    equal = all(map(torch.equal, gradients(split, group), one))
    if group.rank == 0:
        print(f"{name}: {split}")
        print(f"  gradients equal one process, bit by bit: {equal}")
braid.shutdown()
