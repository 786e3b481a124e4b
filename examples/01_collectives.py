"""Collectives by hand: average a gradient over ranks, and compare it with one process.

braid run -n 3 examples/01_collectives.py
"""

from __future__ import annotations

import torch

import braid


def gradient_of(rank: int) -> torch.Tensor:
    """Return the gradient that a rank computes; every rank can compute the gradient of any rank."""
    weight = torch.linspace(-1, 1, 8).requires_grad_()
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank))
    (data @ weight).square().mean().backward()
    assert weight.grad is not None
    return weight.grad


def main() -> None:
    group = braid.init()
    gradient = gradient_of(group.rank)
    group.all_reduce(gradient, "avg")

    expected = gradient_of(0)
    for rank in range(1, group.size):
        expected = expected + gradient_of(rank)  # in rank order, for the same bits
    expected /= group.size
    assert torch.equal(gradient, expected)

    everyone = group.all_gather(torch.tensor([group.rank]))
    if group.rank == 0:
        print(f"ranks {everyone.tolist()} agree with one process, bit by bit")


if __name__ == "__main__":
    main()
