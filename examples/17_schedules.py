"""One model under every schedule: predicted bubbles and memory, and the same gradients.

braid run -n 2 examples/17_schedules.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import braid
from braid.programs.schedule import Costs, simulate
from braid.programs.schedule.pipeline import SCHEDULES
from braid.programs.schedule.pipeline.measures import bubble, peak_activations
from braid.programs.topology import flat

WIDTH, LAYERS, ROWS, MICROBATCHES = 32, 8, 64, 8
COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    )


def main() -> None:
    torch.set_num_threads(1)
    group = braid.init()
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    grads: dict[str, list[torch.Tensor]] = {}
    if group.rank == 0:
        print("schedule      stages  bubble  micro-batches held, by rank")
    for name, make in SCHEDULES.items():
        if name == "forward":
            continue
        program = make(group.size, MICROBATCHES)
        costs = Costs(lambda _r, _a: 0.0, lambda _r, action: COST.get(action.kind, 0.0))
        timeline = simulate(program, costs, flat(group.size, 0.0, 1e9), buffered=True)
        held = " ".join(f"{most:4g}" for most in peak_activations(program))
        if group.rank == 0:
            stages = program.header.num_units
            print(f"{name:13} {stages:6} {bubble(timeline):7.1%}  {held}")
        pipeline = braid.Pipeline(
            new_model(), num_microbatches=MICROBATCHES, schedule=name, group=group
        )
        pipeline.step(x, x, loss=functional.mse_loss)
        for layer, param in pipeline.named_parameters():
            grads.setdefault(layer, []).append(param.grad)
    for found in grads.values():
        assert all(torch.equal(grad, found[0]) for grad in found)
    if group.rank == 0:
        print("every schedule has the same gradients, bit by bit")


if __name__ == "__main__":
    main()
