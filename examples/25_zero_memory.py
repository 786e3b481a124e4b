"""Memory of parameters, gradients and states on each rank, for each stage of ZeRO.

braid run -n 2 examples/25_zero_memory.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import braid
from braid.parallel.data_parallel.ddp.reference import accumulate
from braid.parallel.sharding import Bytes, live_bytes, shard_optimizer

WIDTH, LAYERS, ROWS, STEPS = 64, 32, 4, 3
FLOAT32 = Bytes(param=4, gradient=4, owned_gradient=0, states=8)  # with Adam
MIXED = Bytes(2, gradient=4, owned_gradient=0, states=12)  # bfloat16 with float32 masters
MIXED_1 = Bytes(2, gradient=2, owned_gradient=4, states=12)  # at stage 1


class Chain(nn.Module):
    """Layers in a ModuleList: each is a unit, and its parameters are gathered together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [row, width] to the same shape."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
    return nn.functional.mse_loss(model(x), -x)


def main() -> None:
    group = braid.init()
    whole = Chain()
    optimizer = torch.optim.Adam(whole.parameters())
    for step in range(STEPS):  # one process runs the samples of all ranks
        ranks = range(group.size)
        accumulate(whole, [partial(loss_of, whole, r, step, torch.float32) for r in ranks])
        optimizer.step()
        optimizer.zero_grad()
    for dtype in (torch.float32, torch.bfloat16):
        for stage in (1, 2, 3):
            model = Chain().to(dtype)
            numel = sum(param.numel() for param in model.parameters())
            optimizer = torch.optim.Adam(model.parameters())
            master = {} if dtype == torch.float32 else {"master_dtype": torch.float32}
            sharding = shard_optimizer(optimizer, model, stage=stage, process_group=group, **master)
            for step in range(STEPS):
                loss_of(model, group.rank, step, dtype).backward()
                optimizer.step()
                live = live_bytes(sharding, optimizer)
                sharding.zero_grad()
            cost = FLOAT32 if not master else MIXED_1 if stage == 1 else MIXED
            formula = cost.live(stage, group.size)
            assert abs(live.total - live.slots - formula * numel) < 0.001 * formula * numel
            parts = ", ".join(f"{name} {n / numel:.3g}" for name, n in live._asdict().items())
            if group.rank == 0:
                print(f"{dtype}, stage {stage}: {formula:g} by formula; {parts}")
            sharding.undo()
            if not master:
                for trained, param in zip(model.parameters(), whole.parameters(), strict=True):
                    assert torch.equal(trained, param)
    if group.rank == 0:
        print("all stages have the parameters of one process bit by bit")


if __name__ == "__main__":
    main()
