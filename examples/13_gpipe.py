"""GPipe: the same model and batch with more and more micro-batches, against one process.

braid run -n 2 examples/13_gpipe.py
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional

import braid
from braid.parallel.pipeline import scatter

WIDTH, LAYERS, ROWS, STEPS = 256, 8, 512, 7


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(ROWS, WIDTH, generator=generator),
        torch.randn(ROWS, WIDTH, generator=generator),
    )


def reference(num_microbatches: int) -> nn.Sequential:
    """Run the micro-batches in turn in one process, and add their gradients."""
    model, (x, y) = new_model(), batch()
    sizes = [ROWS // num_microbatches] * num_microbatches
    for part, target in zip(scatter(x, sizes), scatter(y, sizes), strict=True):
        (functional.mse_loss(model(part), target) * (len(part) / ROWS)).backward()
    return model


def main() -> None:
    torch.set_num_threads(1)
    group = braid.init()
    x, y = batch()
    if group.rank == 0:
        print("micro-batches   ms of a step   work / (work + bubble)")
    for m in (1, 2, 4, 8, 16):
        pipeline = braid.Pipeline(new_model(), num_microbatches=m, schedule="gpipe", group=group)
        seconds = []
        for _ in range(STEPS):
            pipeline.zero_grad()
            group.barrier()
            start = time.perf_counter()
            pipeline.step(x, y, loss=functional.mse_loss)
            seconds.append(time.perf_counter() - start)
        if group.rank == 0:
            formula = m / (m + group.size - 1)
            print(f"{m:13} {min(seconds) * 1e3:14.1f} {formula:24.0%}")
        grads = dict(reference(m).named_parameters())
        for name, param in pipeline.named_parameters():
            assert torch.equal(param.grad, grads[name].grad)
    if group.rank == 0:
        print("every number of micro-batches has the gradients of one process, bit by bit")


if __name__ == "__main__":
    main()
