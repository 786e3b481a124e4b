"""A mixture of experts that is divided over ranks, with and without dropped tokens.

braid run -n 2 examples/19_mixture_of_experts.py
"""

from __future__ import annotations

import torch

import braid
from braid.parallel.expert_parallel import MixtureOfExperts, auxiliary_loss, average_gradients

DIM, HIDDEN, EXPERTS, TOKENS = 16, 32, 4, 40


def tokens_of(rank: int) -> torch.Tensor:
    x = torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(rank))
    return x + x[:1] / 2  # so that some experts get more tokens than others


def new_layer(group: braid.Group, capacity_factor: float | None) -> MixtureOfExperts:
    return MixtureOfExperts(
        DIM, HIDDEN, EXPERTS, group=group, top_k=2, capacity_factor=capacity_factor
    )


def divided(group: braid.Group, capacity_factor: float | None) -> MixtureOfExperts:
    """Run forward and backward on this rank's tokens; each rank has some of the experts."""
    layer = new_layer(group, capacity_factor)
    loss = layer(tokens_of(group.rank)).square().mean()
    (loss + auxiliary_loss(layer, load_balance=0, router_z=0.01)).backward()
    average_gradients(layer, group)
    return layer


def alone(group: braid.Group, capacity_factor: float | None, size: int) -> MixtureOfExperts:
    """Run the same layer with all experts on one rank, for the tokens of each rank in turn."""
    layer = new_layer(group, capacity_factor)
    for rank in range(size):
        loss = layer(tokens_of(rank)).square().mean()
        ((loss + auxiliary_loss(layer, load_balance=0, router_z=0.01)) / size).backward()
    return layer


def main() -> None:
    group = braid.init()
    single = group.split(group.rank)
    for capacity_factor in (None, 1.0):
        layer, whole = (
            divided(group, capacity_factor),
            alone(single, capacity_factor, group.size),
        )
        again = divided(group, capacity_factor)
        experts = slice(
            group.rank * EXPERTS // group.size, (group.rank + 1) * EXPERTS // group.size
        )
        for mine, reference in (
            (layer.router.grad, whole.router.grad),
            (layer.up.grad, whole.up.grad[experts]),
            (layer.down.grad, whole.down.grad[experts]),
        ):
            assert (mine - reference).abs().max() < 2e-6 * reference.abs().max()
        pairs = zip(layer.parameters(), again.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
        numbers = layer.statistics()
        loads = ", ".join(f"{numbers[f'load_{e}']:.2f}" for e in range(EXPERTS))
        if group.rank == 0:
            print(f"loads {loads}; {numbers['dropped_share']:.0%} of the choices dropped")
    if group.rank == 0:
        print("gradients equal one process up to rounding; two runs agree bit by bit")


if __name__ == "__main__":
    main()
