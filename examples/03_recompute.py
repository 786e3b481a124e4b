"""Train with less memory: recompute some activations, and compare the formula with measurements.

braid run -n 1 examples/03_recompute.py
"""

from __future__ import annotations

import time

import torch
from torch import nn

from braid.comm.autograd import (
    LiveTensors,
    RecomputePlan,
    by_budget,
    checkpoint_sequential,
    equal_segments,
    least_budget,
    measure,
    sqrt_segments,
)

LAYERS = 16


class Block(nn.Module):
    """Two linear layers; registers the activations that backward needs with `live`."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.live = LiveTensors()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102 - torch's
        inner = self.live.register(torch.tanh(self.up(x)))
        return self.live.register(torch.tanh(self.down(inner)))


def seconds_of_step(model: nn.Sequential, plan: RecomputePlan, x: torch.Tensor) -> float:
    model.zero_grad()
    start = time.perf_counter()
    # early_stop=False lets every recomputed block return, so that its output is counted
    checkpoint_sequential(model, plan, x, early_stop=False).square().mean().backward()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(128, 128 * (1 + i % 3)) for i in range(LAYERS)])
    x = torch.randn(256, 128)
    costs = measure(model, x, repeats=9)
    everything = equal_segments(LAYERS, 1)
    plans = {
        "keep everything": everything,
        "sqrt(n) segments": sqrt_segments(LAYERS),
        "half the memory": by_budget(costs, everything.peak_bytes(costs) // 2),
        "the least memory": by_budget(costs, least_budget(costs)),
    }
    print("                   MB kept for      ms of forward again   recomputed")
    print("                   backward           formula  measured   (in parentheses)")
    gradients: dict[str, list[torch.Tensor]] = {}
    seconds = dict.fromkeys(plans, float("inf"))
    for _ in range(8):  # in turn, so that other load hits all plans alike
        for name, plan in plans.items():
            live = LiveTensors()
            for block in model:
                block.live = live
            seconds[name] = min(seconds[name], seconds_of_step(model, plan, x))
            gradients[name] = [p.grad for p in model.parameters()]
            assert live.peak_bytes == plan.peak_bytes(costs)
    for name, plan in plans.items():
        peak_mb, extra_ms = plan.peak_bytes(costs) / 1e6, plan.recomputed_s(costs) * 1e3
        measured_ms = (seconds[name] - seconds["keep everything"]) * 1e3
        print(f"{name:18} {peak_mb:9.2f} {extra_ms:17.1f} {measured_ms:9.1f}   {plan}")
    for found in gradients.values():
        assert all(map(torch.equal, found, gradients["keep everything"]))
    print("peaks equal the formula, and gradients equal the plain run, bit by bit")


if __name__ == "__main__":
    main()
