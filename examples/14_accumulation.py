"""Gradient accumulation as a pipeline of one stage, with parts of unequal sizes.

braid run -n 2 examples/14_accumulation.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import braid

SIZES = (5, 5, 4)  # rows of the parts of a batch of 14


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(SIZES), 6, generator=generator)
    return x, torch.randint(3, (sum(SIZES),), generator=generator)


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters()]


def by_hand(*, weighted: bool) -> list[torch.Tensor]:
    """Run backward for each part in turn; torch adds the gradients."""
    model, (x, y) = new_model(), batch()
    for part, target in zip(x.split(SIZES), y.split(SIZES), strict=True):
        weight = len(part) / len(x) if weighted else 1 / len(SIZES)
        (functional.cross_entropy(model(part), target) * weight).backward()
    return grads_of(model)


def main() -> None:
    group = braid.init()
    alone = group.split(group.rank)  # a pipeline of one stage, on each rank
    whole, (x, y) = new_model(), batch()
    functional.cross_entropy(whole(x), y).backward()
    pipeline = braid.Pipeline(new_model(), num_microbatches=3, group=alone)
    pipeline.step(x, y, loss=functional.cross_entropy)
    assert all(map(torch.equal, grads_of(pipeline), by_hand(weighted=True)))
    for name, grads in (
        ("weighted by rows", by_hand(weighted=True)),
        ("all parts alike", by_hand(weighted=False)),
    ):
        pairs = zip(grads, grads_of(whole), strict=True)
        gap = max((a - b).abs().max().item() for a, b in pairs)
        if group.rank == 0:
            print(f"{name:17} differs from the whole batch by {gap:.1e}")
    if group.rank == 0:
        print("a pipeline of one stage is accumulation by hand, bit by bit")


if __name__ == "__main__":
    main()
