"""Recomputation on a device: random numbers, autocast, and the memory that it saves."""

from __future__ import annotations

import pytest
import torch
from gpu_models import layers, tokens
from torch import nn

from braid.comm.autograd import checkpoint
from braid.comm.autograd.layer_costs import PeakBytes


def _net(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.Dropout(0.5), nn.GELU(), nn.Linear(64, 32), nn.Dropout(0.5)
    ).to(device)


def _gradients(device: str, *, again: bool, autocast: bool) -> list[torch.Tensor]:
    net = _net(device)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    torch.manual_seed(7)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        y = checkpoint(net, x) if again else net(x)
    after = torch.rand(1, device=device)  # of the same generator
    (y.float().square().sum() * after).backward()
    assert x.grad is not None
    return [x.grad, *(param.grad for param in net.parameters())]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_recomputed_layers_draw_the_same_numbers(device, autocast):
    plain = _gradients(device, again=False, autocast=autocast)
    for a, b in zip(_gradients(device, again=True, autocast=autocast), plain, strict=True):
        assert torch.equal(a, b)


def _peak(device: str, *, again: bool) -> tuple[int, int, int]:
    """Return the peak bytes of a step, those of a block's inputs, and the number of blocks."""
    blocks = [block.to(device) for block in layers(device)[1:-1]]
    width = next(blocks[0].parameters()).shape[-1]
    x = torch.zeros(*tokens(device, 0).shape, width, device=device, requires_grad=True)

    def train() -> None:
        y = x
        for block in blocks:
            y = checkpoint(block, y) if again else block(y)
        y.sum().backward()

    train()  # gradients are there from now on
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train()
        peak = torch.cuda.max_memory_allocated() - before
        return peak, x.nbytes, len(blocks)
    with PeakBytes() as noted:
        train()
    return int(noted.live.peak_bytes), x.nbytes, len(blocks)


def test_memory_falls_to_inputs_and_one_block(device, figures):
    whole, inputs, num_blocks = _peak(device, again=False)
    recomputed, *_ = _peak(device, again=True)
    formula = (num_blocks - 1) * inputs + whole / num_blocks
    figures(
        whole_mb=round(whole / 1e6, 2),
        recomputed_mb=round(recomputed / 1e6, 2),
        formula_mb=round(formula / 1e6, 2),
    )
    assert recomputed < whole
    assert 0.5 < recomputed / formula < 2.5  # the block that computes again holds gradients, too
