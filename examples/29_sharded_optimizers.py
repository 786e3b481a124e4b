"""Optimizers on shards: of elements or of whole parameters, and the norm over all ranks.

braid run -n 2 examples/29_sharded_optimizers.py
"""

from __future__ import annotations

import tempfile
from functools import partial

import torch
from torch import nn

import braid
from braid.parallel.data_parallel.ddp.reference import accumulate
from braid.parallel.gradients.exact_norm import clip_pieces_
from braid.parallel.sharding import DiskOffloadPolicy, shard_optimizer

D, H, LAYERS, ROWS, STEPS = 64, 128, 4, 4, 3
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "Adafactor": torch.optim.Adafactor,  # looks at rows and columns
}


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, D)) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.mse_loss(model(x), -x)


def main() -> None:
    group = braid.init()
    folder = tempfile.TemporaryDirectory()
    for name, make in OPTIMIZERS.items():
        whole = new_model()
        reference = make(whole.parameters())
        for step in range(STEPS):  # one process runs the samples of all ranks
            accumulate(whole, [partial(loss_of, whole, rank, step) for rank in range(group.size)])
            norm = clip_pieces_([param.grad for param in whole.parameters()], 0.05)
            reference.step()
            reference.zero_grad()
        for stage in (1, 2, 3):
            model = new_model()
            optimizer = make(model.parameters())
            options = {"offload": DiskOffloadPolicy(directory=folder.name)} if stage == 2 else {}
            sharding = shard_optimizer(
                optimizer, model, stage=stage, process_group=group, **options
            )
            for step in range(STEPS):
                loss_of(model, group.rank, step).backward()
                seen = torch.cat([piece.flatten() for piece in sharding.pieces()]).norm()
                clipped = sharding.clip_grad_norm_(0.05)
                optimizer.step()
                sharding.zero_grad()
            assert clipped == norm
            numel = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
            kind = "whole parameters" if sharding.options.whole else "elements"
            if group.rank == 0:
                norms = f"norm {clipped:.4f}, of the pieces here {seen:.4f}"
                print(f"{name}, stage {stage}: {kind}, {numel} here; {norms}")
            sharding.undo()
            for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
                assert torch.equal(param, expected)
    if group.rank == 0:
        print("norms and parameters equal one process bit by bit")


if __name__ == "__main__":
    main()
