"""Ranks of a pipeline agree on the model, and tensors between them keep their order in memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from training import linear, said_by

from braid.comm import Group
from braid.errors import ConfigError, MismatchError
from braid.parallel.pipeline import Pipeline
from braid.parallel.pipeline.memory_order import as_in_memory, order_of, restored

mse = functional.mse_loss


def layers(*widths: int) -> list[nn.Module]:
    return [linear(a, b) for a, b in itertools.pairwise(widths)]


def _other_model(group: Group) -> str:
    own = layers(4, 4, 4) if group.rank else layers(4, 5, 4)
    return said_by(lambda: Pipeline(own, num_microbatches=2, group=group), MismatchError)


def _other_arguments(group: Group) -> str:
    return said_by(
        lambda: Pipeline(
            layers(4, 4, 4), num_microbatches=2 + group.rank, group=group, seed=group.rank
        ),
        MismatchError,
    )


def test_other_models_and_arguments_are_named_on_all_ranks(world):
    for said in world(2, _other_model):
        assert "rank 0  0.weight float32[5, 4]" in said
        assert "rank 1  0.weight float32[4, 4]" in said
    for said in world(2, _other_arguments):
        assert "rank 1  num_microbatches=3" in said
        assert "rank 0  seed=0" in said


def _wrong_in_three_ways(group: Group) -> str:
    return said_by(
        lambda: Pipeline(
            layers(4, 4, 4),
            num_microbatches=0,
            balance=[5],
            recompute="sometimes",
            group=group,
        ),
        ConfigError,
    )


def test_all_problems_are_named_at_once(world):
    for said in world(1, _wrong_in_three_ways):
        assert "recompute must be one of" in said
        assert "micro-batch" in said
        assert "[5], which add up to 5" in said


class Head(nn.Module):
    """A linear layer with the weight of another."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def _unequal_copies(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(group.rank)
    first = nn.Linear(4, 4)
    pair, replicas = group.split(group.rank // 2), group.split(group.rank % 2)
    assert pair is not None
    tied = Pipeline([first, Head(first.weight)], num_microbatches=1, group=pair)
    plain = Pipeline(
        [nn.Linear(4, 4), nn.Linear(4, 4)],
        num_microbatches=1,
        group=pair,
        replicas=replicas,
    )
    return next(tied.parameters()).detach(), next(plain.parameters()).detach()


def test_shared_parameters_and_replicas_begin_equal(procs):
    tied, plain = zip(*procs(4, _unequal_copies), strict=True)
    assert torch.equal(tied[0], tied[1])
    assert torch.equal(plain[0], plain[2])
    assert torch.equal(plain[1], plain[3])
    assert not torch.equal(plain[0], plain[1])


class Strided(nn.Module):
    """Notes the strides of its input and of the gradient of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.skip_init(nn.Conv2d, 3, 3, 3, padding=1)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.stride())
        y: torch.Tensor = self.conv(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.seen.append(grad.stride()))
        return y


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(4, 3, 8, 6, generator=generator).to(memory_format=torch.channels_last)
        for _ in range(2)
    )
    return x, y


def _convolutions(group: Group, schedule: str) -> tuple[list[Any], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    own = [Strided() for _ in range(4)]
    for layer in own:
        for param in layer.parameters():
            param.data = torch.randn(param.shape, generator=generator)
        layer.to(memory_format=torch.channels_last)
    pipeline = Pipeline(own, num_microbatches=2, schedule=schedule, group=group)
    pipeline.step(*images(), loss=mse)
    seen = [set(layer.seen) for layer in own if layer.seen]
    return seen, [p.grad for p in pipeline.parameters() if p.grad is not None]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_channels_last_images_stay_so_on_all_stages(world, schedule):
    ((strides, alone),) = world(1, _convolutions, schedule)
    assert strides[0] == {(8 * 6 * 3, 1, 6 * 3, 3)}
    both = world(2, _convolutions, schedule)
    assert [own for seen, _ in both for own in seen] == strides
    grads = [grad for _, own in both for grad in own]
    assert all(torch.equal(a, b) for a, b in zip(grads, alone, strict=True))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.randoms())
def test_any_order_of_dims_is_restored(shape, random):
    order = list(range(len(shape)))
    random.shuffle(order)
    x = torch.arange(torch.Size(shape).numel()).view([shape[d] for d in order])
    x = x.permute(sorted(order, key=order.index))
    again = restored(as_in_memory(x), x.shape, order_of(x))
    assert torch.equal(again, x)
    assert as_in_memory(again).is_contiguous()
