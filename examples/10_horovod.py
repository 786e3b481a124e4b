"""Training in Horovod's style: gradients by name, in any order, with fewer batches on one rank.

braid run -n 2 examples/10_horovod.py
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from torch import nn

import braid.compat.horovod.torch as hvd
from braid.parallel.data_parallel import accumulate

BATCHES = (5, 4)  # of rank 0 and of rank 1
LAYERS = 4


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(LAYERS)])


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
    order = list(model) if rank == 0 else list(model)[::-1]  # rank 1's gradients come reversed
    return sum((layer(x) - x).square().mean() for layer in order)


def train(directory: Path) -> nn.Module:
    model = new_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.start_timeline(str(directory / "timeline.json"))
    for step in range(BATCHES[hvd.rank()]):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()  # its hooks submit "gradient.0.weight", ...
        optimizer.step()  # waits for them
    last = hvd.join()  # this rank contributes zeros until all ranks have joined
    hvd.stop_timeline()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)  # that rank took the last step
    return model


def alone() -> nn.Module:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(BATCHES)):
        losses = [partial(loss_of, model, rank, step) for rank in range(2)]
        if step >= BATCHES[1]:
            losses[1] = lambda step=step: loss_of(model, 1, step) * 0.0
        accumulate(model, losses)
        optimizer.step()
    return model


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    with tempfile.TemporaryDirectory() as directory:
        model = train(Path(directory))
        if hvd.rank() == 0:
            events = json.loads((Path(directory) / "timeline.json").read_text())["traceEvents"]
            counts = Counter(event["name"] for event in events if event["ph"] == "X")
            print("spans of both ranks:", dict(counts))
    assert all(map(torch.equal, model.parameters(), alone().parameters()))
    if hvd.rank() == 0:
        print("ranks with 5 and 4 batches have the weights of one process, bit by bit")


if __name__ == "__main__":
    main()
