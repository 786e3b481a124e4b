"""Steps of training, from which a profile takes how much longer layers are in them than alone."""

from __future__ import annotations

import time

import torch
from torch import nn

from braid.comm import Group
from braid.plan.profiling import Curve, HostProfile, in_training

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

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.linear = linear()
        self.rows = nn.Embedding.from_pretrained(torch.ones(3, 2), freeze=False, sparse=sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(S)
        return self.linear(x) + self.rows(torch.zeros(len(x), dtype=torch.int64))


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


def measured(group: Group) -> None:
    layers = [Slow(), nn.Tanh(), Slow(sparse=True)]
    before = [p.clone() for layer in layers for p in layer.parameters()]
    x = torch.ones(3, 2)
    for loss in (None, lambda y: y.square().mean()):
        assert in_training(S / 10, host(group.size), layers, x, loss, group) >= 20
        assert in_training(1e9, host(group.size), layers, x, loss, group) == 1.0  # never faster
    params = [p for layer in layers for p in layer.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in params)


def test_layers_take_as_long_as_a_step_of_training(world):
    world(2, measured)


def test_one_rank_measures_alone(world):
    world(1, measured)


def without_gradients(group: Group) -> None:
    frozen = linear().requires_grad_(False)
    assert in_training(1e-9, host(group.size), [frozen], torch.ones(3, 2), None, group) == 1.0
    counts = [linear(), Counts()]
    assert in_training(1e-9, host(group.size), counts, torch.ones(3, 2), None, group) >= 1.0


class Counts(nn.Module):
    """Layer whose output has no gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)


def test_a_model_without_gradients_is_measured_too(world):
    world(2, without_gradients)
