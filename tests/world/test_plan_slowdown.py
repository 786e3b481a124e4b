"""Steps of training, from which a profile takes how much longer layers are in them than alone."""

from __future__ import annotations

import time

import torch
from torch import nn

from braid.comm import Group
from braid.plan.profiling import Curve, HostProfile, slowdown

FREE = Curve((0.0,), (0.0,))
S = 2e-3


def linear() -> nn.Linear:
    """Return a layer without the generator that ranks on threads share."""
    layer = torch.nn.utils.skip_init(nn.Linear, 2, 2)
    for param in layer.parameters():
        nn.init.ones_(param)
    return layer


class Slow(nn.Module):
    """Linear layer that takes at least S seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(S)
        return self.linear(x)


class NotANumber(nn.Module):
    """Layer with gradients of NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x * 0).sqrt()


def host(ranks: int) -> HostProfile:
    free = dict.fromkeys((f"all_reduce/{ranks}",), FREE)
    costs = {
        "message": FREE,
        "optimizer": FREE,
        "action_s": 0.0,
        "step_s": 0.0,
        "memory_bytes": 0.0,
    }
    return HostProfile(ranks=ranks, collectives=free, **costs)


def ratio(alone_s, layers, group, loss=None):
    x = torch.ones(3, 2)
    return slowdown(alone_s, host(group.size), layers, x, loss, group, limit_s=0.1)


def measured(group: Group) -> None:
    layers = [nn.Tanh(), Slow(), nn.ReLU(inplace=True), NotANumber()]
    before = [p.clone() for layer in layers for p in layer.parameters()]
    for loss in (None, lambda y: y.square().mean()):
        assert ratio(S / 10, layers, group, loss) >= 10
        assert ratio(1e9, layers, group, loss) == 1.0  # never faster than alone
    params = [p for layer in layers for p in layer.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in params)


def test_layers_take_as_long_as_a_step_of_training(world):
    world(2, measured)


def test_one_rank_measures_alone(world):
    world(1, measured)


def without_gradients(group: Group) -> None:
    assert ratio(1e-9, [linear().requires_grad_(False)], group) == 1.0
    assert ratio(1e-9, [linear(), Counts()], group) >= 1.0


class Counts(nn.Module):
    """Layer with an output without a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)


def test_a_model_without_gradients_is_measured_too(world):
    world(2, without_gradients)
