"""FullyShardedDataParallel step by step: when each layer is whole, and how many bytes are sent.

braid run -n 2 examples/26_fsdp_steps.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import braid
from braid.parallel.data_parallel.ddp.reference import accumulate
from braid.parallel.sharding.residency import Unit

WIDTH, LAYERS, ROWS, STEPS = 32, 6, 4, 3


class Chain(nn.Module):
    """Layers in a ModuleList: each layer is a unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [row, width] to the same shape."""
        for layer in self.layers:
            x = layer(torch.tanh(x))
        return x


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.mse_loss(model(x), -x)


def look(units: list[Unit], seen: list[str], text: str, *_: object) -> None:
    """Record which layers are whole (#), being gathered (>), and in parts (.)."""
    flats = [unit.flats[0] for unit in units]
    seen.append(
        text + "".join("#" if f.is_whole else "." if f.full is None else ">" for f in flats)
    )


def main() -> None:
    group = braid.init()
    whole = Chain()
    optimizer = torch.optim.AdamW(whole.parameters())
    for step in range(STEPS):  # one process runs the samples of all ranks
        accumulate(whole, [partial(loss_of, whole, rank, step) for rank in range(group.size)])
        optimizer.step()
        optimizer.zero_grad()
    for reshard in (None, False):
        model = braid.FullyShardedDataParallel(Chain(), group, reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters())
        units, seen = model.sharding.units[1:], []  # without the root
        for index, layer in enumerate(model.layers):
            layer.register_forward_pre_hook(partial(look, units, seen, f"forward  {index}  "))
            hook = partial(look, units, seen, f"backward {index}  ")
            layer.register_forward_hook(lambda _m, _x, y, hook=hook: y.register_hook(hook) and None)
        for step in range(STEPS):
            seen.clear()
            before = group.statistics()["nbytes"]
            loss_of(model, group.rank, step).backward()
            sent = group.statistics()["nbytes"] - before
            optimizer.step()
            optimizer.zero_grad()
        state = model.state_dict()
        assert all(torch.equal(state[name], param) for name, param in whole.named_parameters())
        if group.rank == 0:
            print(f"reshard_after_forward={reshard}, collectives of {sent} bytes:", *seen, sep="\n")
    if group.rank == 0:
        print("parameters equal one process bit by bit")


if __name__ == "__main__":
    main()
