"""A model that is not sequential is captured, cut into two stages, and trained on two ranks.

braid run -n 2 examples/49_converted_model.py
"""

from __future__ import annotations

import torch
from torch import nn

import braid

BATCH, WIDTH = 8, 16


class Residual(nn.Module):
    """Layers with residual connections, and a head that also gets the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, width) to (rows, 1)."""
        first = x
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        result: torch.Tensor = self.head(torch.cat([x, first], dim=1))
        return result


def trained(group: braid.Group) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of four steps on the ranks of `group`, and this rank's weights."""
    torch.manual_seed(0)
    model = Residual()
    graph = braid.capture(model, torch.randn(BATCH, WIDTH))
    pipeline = braid.Pipeline(graph, num_microbatches=4, group=group)
    if group.size > 1 and not group.rank:
        print(graph)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        loss = pipeline.step(x, x[:, :1], loss=nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    mine = {id(p) for p in pipeline.parameters()}
    return losses, {name: p.detach() for name, p in model.named_parameters() if id(p) in mine}


world = braid.init()
torch.set_num_threads(1)
alone = world.split(world.rank)
assert alone is not None
losses, weights = trained(world)
expected, whole = trained(alone)
equal = losses == expected and all(torch.equal(p, whole[name]) for name, p in weights.items())
everywhere = world.all_gather(torch.tensor([equal])).all().item()
if world.rank == 0:
    print(f"losses and weights equal one process, bit by bit: {everywhere}")
braid.shutdown()
