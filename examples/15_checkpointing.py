"""Recomputation in a pipeline: the memory that a rank keeps, and the time of a step.

braid run -n 2 examples/15_checkpointing.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import braid

WIDTH, LAYERS, ROWS, MICROBATCHES = 256, 8, 512, 8
MODES = ("never", "except_last", "always", 2)


class Block(nn.Module):
    """A layer with dropout: the recomputed forward must draw the same random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102 - torch's
        return x + functional.dropout(self.down(functional.gelu(self.up(x))), 0.1)


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


class Kept:
    """Counts the bytes that autograd keeps for backward, and their peak."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def pack(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:  # noqa: D102
        self.now += x.nbytes
        self.peak = max(self.peak, self.now)

        def unpack() -> torch.Tensor:
            self.now -= x.nbytes
            return x

        return unpack


def main() -> None:
    torch.set_num_threads(1)
    group = braid.init()
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    expected: list[torch.Tensor] = []
    if group.rank == 0:
        print("recompute     MB kept on rank 0   ms of a step")
    for mode in MODES:
        pipeline = braid.Pipeline(
            new_model(),
            num_microbatches=MICROBATCHES,
            schedule="gpipe",
            group=group,
            recompute=mode,
        )
        pipeline.step(x, x, loss=functional.mse_loss)
        pipeline.zero_grad()
        pipeline.num_steps = 0  # dropout draws by the number of the step
        kept = Kept()
        with saved_tensors_hooks(kept.pack, lambda unpack: unpack()):
            start = time.perf_counter()
            pipeline.step(x, x, loss=functional.mse_loss)
            spent_s = time.perf_counter() - start
        grads = [p.grad for p in pipeline.parameters()]
        expected = expected or grads
        assert all(map(torch.equal, grads, expected))
        if group.rank == 0:
            print(f"{mode!s:12} {kept.peak / 1e6:18.1f} {spent_s * 1e3:14.1f}")
    if group.rank == 0:
        print("all modes have the gradients of the plain run, bit by bit")


if __name__ == "__main__":
    main()
