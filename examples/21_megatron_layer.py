"""A layer of a transformer, divided as Megatron does: two all_reduces forward, two backward.

braid run -n 2 examples/21_megatron_layer.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import braid
from braid.parallel.tensor_parallel import Division, slicing_of

WIDTH, HEADS, BATCH, LENGTH = 64, 4, 2, 16


class Layer(nn.Module):
    """Attention and an MLP in plain torch, without any code for ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, position, width] to the same shape."""
        h = self.norm(x)
        qkv = [layer(h) for layer in (self.query, self.key, self.value)]
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in qkv)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


def new_layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


def divided(
    group: braid.Group, x: torch.Tensor
) -> tuple[Division, dict[str, nn.Parameter], torch.Tensor, int]:
    """Run forward and backward on parts; return the division, parameters, output, operations."""
    model = new_layer()
    division = braid.parallelize(model, group, inputs=x)
    for _ in range(2):
        model(x)  # in the first calls ranks also compare their inputs
    before = group.statistics()["num_operations"]
    y = model(x)
    y.square().mean().backward()
    operations = group.statistics()["num_operations"] - before
    return division, dict(model.named_parameters()), y.detach(), operations


def main() -> None:
    group = braid.init()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, requires_grad=True)
    division, params, y, operations = divided(group, x)
    again = divided(group, x)
    assert operations == 4
    assert all(torch.equal(param.grad, again[1][name].grad) for name, param in params.items())
    whole = new_layer()
    expected = whole(x)
    expected.square().mean().backward()
    largest = max(param.grad.abs().max() for param in whole.parameters())
    for name, param in whole.named_parameters():
        slicing = slicing_of(params[name])
        part = slicing.part_of(param.grad, group.rank, group.size) if slicing else param.grad
        assert (params[name].grad - part).abs().max() < 1e-6 * largest
    torch.testing.assert_close(y, expected.detach())
    if group.rank == 0:
        print(", ".join(f"{name} {kind}" for name, kind in division.items()))
        print(division.explain().splitlines()[-1])
        print("output and gradients equal one process up to rounding; two runs agree bit by bit")


if __name__ == "__main__":
    main()
