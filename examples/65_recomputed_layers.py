"""Recomputed layers of a model: the memory of each strategy, and the work that is repeated.

braid run -n 1 examples/65_recomputed_layers.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from braid.comm.autograd import recompute_layers
from braid.comm.autograd.layer_costs import PeakBytes

WIDTH, LAYERS, ROWS = 64, 16, 256


class Block(nn.Module):
    """Two linear layers with dropout; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.num_calls = nn.LayerNorm(WIDTH), 0
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102 - torch's
        self.num_calls += 1
        y = functional.gelu(self.up(self.norm(x)))
        return x + functional.dropout(self.down(y), 0.1)


class Model(nn.Module):
    """Blocks in a list, as models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102 - torch's
        for block in self.blocks:
            x = block(x)
        return x


class Meter(PeakBytes):
    """Measures the peak of live bytes, and counts the matrix products of forwards."""

    num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_products += func is torch.ops.aten.addmm.default
        return super().__torch_dispatch__(func, types, args, kwargs)


def step(strategy: Any) -> tuple[list[torch.Tensor], float, int, int]:
    """Return gradients, the peak of live MB without them, forwards of blocks, and products."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(ROWS, WIDTH)
    if strategy is not None:
        recompute_layers(model, strategy)
    grads = [torch.zeros_like(p) for p in model.parameters()]
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad
    known = [x, *model.parameters(), *grads]
    with Meter(known) as meter:
        model(x).square().mean().backward()
    peak_bytes = meter.live.peak_bytes - sum(t.nbytes for t in known)
    calls = sum(block.num_calls for block in model.blocks)
    return grads, peak_bytes / 1e6, calls, meter.num_products


def main() -> None:
    torch.set_num_threads(1)
    expected, *_ = step(None)
    print("strategy                      peak MB   forwards of blocks   matrix products")
    for strategy in (None, "speed", ["blocks.5", "blocks.10"], "memory", 8, LAYERS):
        grads, peak_mb, calls, products = step(strategy)
        assert all(map(torch.equal, grads, expected))
        print(f"{strategy!s:26} {peak_mb:10.2f} {calls:20} {products:17}")
    print("all strategies have the gradients of the plain run, bit by bit")


if __name__ == "__main__":
    main()
