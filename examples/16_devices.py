"""A pipeline over the devices of one process, called as any other module.

braid run -n 1 examples/16_devices.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from braid.parallel.pipeline import DevicePipeline

WIDTH, ROWS, MICROBATCHES = 64, 256, 4


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))


def main() -> None:
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())][:3] or ["cpu"] * 3
    balance = [6] if len(devices) == 1 else [3, 3] if len(devices) == 2 else [2, 2, 2]
    pipeline = DevicePipeline(
        new_model(), devices, balance=balance, num_microbatches=MICROBATCHES, recompute="never"
    )
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    pipeline.spans = []
    output = pipeline(x)
    functional.mse_loss(output, x.to(output.device)).backward()
    begin = min(span.begin_ns for span in pipeline.spans)
    for rank in range(len(balance)):
        forwards = [s for s in pipeline.spans if s.rank == rank and s.name.startswith("F")]
        starts = "  ".join(f"F{s.microbatch} {(s.begin_ns - begin) / 1e3:5.0f}" for s in forwards)
        print(f"us at which device {rank} begins   {starts}")
    whole = new_model()
    outputs = torch.cat([whole(part) for part in x.split(ROWS // MICROBATCHES)])
    functional.mse_loss(outputs, x).backward()
    for stage_param, param in zip(pipeline.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(stage_param.grad.cpu(), param.grad)
    again = [p.grad.clone() for p in pipeline.parameters()]
    pipeline.zero_grad()
    functional.mse_loss(pipeline(x), x.to(output.device)).backward()
    assert all(map(torch.equal, again, [p.grad for p in pipeline.parameters()]))
    print("stages on threads have the gradients of one module, in each run the same, bit by bit")


if __name__ == "__main__":
    main()
