"""Asynchronous pipelines with three rules for weights, compared with one process.

braid run -n 4 examples/46_weight_versions.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional

import braid
from braid.parallel.pipeline.asynchronous import AsynchronousPipeline, Emulation

WIDTH, ROWS, MICROBATCHES, LAST = 32, 16, 200, 50
SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.9)


def new_model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0.0, WIDTH**-0.5, generator=generator)
    return model


def microbatches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    inputs = torch.randn(MICROBATCHES, ROWS, WIDTH, generator=generator)
    return [(x, torch.tanh(x @ teacher)) for x in inputs]


def main() -> None:
    torch.set_num_threads(1)
    group = braid.init()
    rules = {
        "fresh": ((1,), {}),
        "stash": ((1,) * group.size, {"versions": "stash"}),
        "vertical_sync": ((1,) * group.size, {"versions": "vertical_sync"}),
        "2bw": ((1,) * group.size, {"versions": "2bw", "every": group.size}),
    }
    for name, (counts, options) in rules.items():
        model = new_model()
        emulation = Emulation(model, SGD, replicas=counts, **options)
        losses = emulation.train_on(microbatches(), loss=functional.mse_loss)
        note = ""
        if name != "fresh":
            pipeline = AsynchronousPipeline(new_model(), SGD, group=group, **options)
            found = pipeline.train_on(microbatches(), loss=functional.mse_loss)
            assert torch.equal(found, losses)
            known = model.state_dict()
            assert all(torch.equal(x, known[n]) for n, x in pipeline.state_dict().items())
            note = f"oldest {max(pipeline.staleness)}, versions {pipeline.most_live}"
        if group.rank == 0:
            print(f"{name:13} loss {losses[-LAST:].mean():.5f}  {note}".rstrip())
    if group.rank == 0:
        print("losses and weights equal one process bit by bit")
    braid.shutdown()


if __name__ == "__main__":
    main()
