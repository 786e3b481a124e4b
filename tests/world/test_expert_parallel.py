"""Experts divided over ranks compute what they do in one process, with and without dropping."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from training import said_by

import braid
from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.data_parallel import DistributedDataParallel
from braid.parallel.expert_parallel import (
    MixtureOfExperts,
    auxiliary_loss,
    average_gradients,
    clip_grad_norm_,
    divide_experts,
    is_of_experts,
    undivide_experts,
)

DIM, HIDDEN, EXPERTS = 8, 12, 12


def tokens(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(count, DIM, generator=generator, dtype=torch.float64)
    return (x + x[:1]).to(dtype)  # tokens of a rank prefer some experts


def layer(group: Group, dtype: torch.dtype, **options: Any) -> MixtureOfExperts:
    return MixtureOfExperts(DIM, HIDDEN, EXPERTS, group=group, **options).to(dtype)


def counts_of(size: int, uneven: bool) -> list[int]:
    return [5 + 4 * rank * uneven for rank in range(size)]


def _gaps(
    group: Group, dtype: torch.dtype, top_k: int, capacity_factor: float | None, uneven: bool
) -> list[float]:
    """Largest differences from one process that runs each rank's tokens in turn."""
    options = {"top_k": top_k, "capacity_factor": capacity_factor}
    rank, size, rows = group.rank, group.size, counts_of(group.size, uneven)
    alone = group.split(group.rank)
    assert alone is not None
    whole = layer(alone, dtype, **options)
    expected, inputs, dropped = [], [], 0.0
    for other in range(size):
        inputs.append(tokens(other, rows[other], dtype).requires_grad_())
        expected.append(whole(inputs[other]))
        dropped += whole.statistics()["dropped_share"] * rows[other] / sum(rows)
    balance = layer(alone, dtype, top_k=top_k)
    balance(torch.cat(inputs))
    losses = torch.stack([out.square().sum() for out in expected])
    (losses.mean() + auxiliary_loss(balance) - auxiliary_loss(balance).detach()).backward()

    model = layer(group, dtype, **options)
    x = tokens(rank, rows[rank], dtype).requires_grad_()
    out = model(x)
    auxiliary = auxiliary_loss(model)
    (out.square().sum() + auxiliary).backward()
    x_grad = inputs[rank].grad
    average_gradients(model, group)
    own = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    pairs = [
        (out, expected[rank]),
        (x.grad / size, x_grad),
        (group.all_reduce(auxiliary.detach(), op="avg"), auxiliary_loss(balance)),
        (torch.tensor(model.statistics()["dropped_share"]), torch.tensor(dropped)),
        (model.router.grad, whole.router.grad + balance.router.grad),
        (model.up.grad, whole.up.grad[own]),
        (model.down.grad, whole.down.grad[own]),
    ]
    return [
        ((a - b).abs().max() / torch.cat([b.flatten(), b.new_tensor([1e-3])]).abs().max()).item()
        for a, b in pairs
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("capacity_factor", [None, 0.6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_divided_experts_compute_what_one_process_does(
    world, size, capacity_factor, dtype, tolerance
):
    for gaps in world(size, _gaps, dtype, 2, capacity_factor, size == 3):
        assert max(gaps) <= tolerance, gaps


@given(
    size=st.integers(1, 4),
    top_k=st.integers(1, 4),
    capacity_factor=st.sampled_from([None, 0.1, 1.0, 2.0]),
    uneven=st.booleans(),
)
@settings(max_examples=15)
def test_any_number_of_choices_and_capacity_is_that_of_one_process(
    world, size, top_k, capacity_factor, uneven
):
    for gaps in world(size, _gaps, torch.float64, top_k, capacity_factor, uneven):
        assert max(gaps) <= 1e-12, gaps


def _grads(group: Group) -> list[torch.Tensor]:
    model = layer(group, torch.float32, top_k=3, capacity_factor=1.0)
    x = tokens(group.rank, 20, torch.float32).requires_grad_()
    out = model(x)
    (out.square().sum() + auxiliary_loss(model)).backward()
    return [out.detach(), x.grad, *(param.grad for param in model.parameters())]


def test_two_runs_are_equal_bitwise(world):
    first, second = (world(3, _grads) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _extremes(group: Group) -> list[Any]:
    """All tokens to one expert; and a rank without tokens."""
    model = layer(group, torch.float64, top_k=1)
    with torch.no_grad():
        model.router.zero_()  # of equal probabilities the first is chosen
    x = tokens(group.rank, 3 * group.rank, torch.float64).requires_grad_()
    out = model(x)
    out.sum().backward()
    average_gradients(model, group)
    zero = [bool((grad == 0).all()) for grad in (model.up.grad[1:], model.down.grad[1:])]
    loads = model.statistics()
    half = layer(group, torch.bfloat16)(x.detach().bfloat16())
    return [out.shape, x.grad.shape, zero, loads["load_0"], loads["dropped_share"], half.dtype]


def test_ranks_without_tokens_and_experts_without_tokens_take_part(world):
    for rank, found in enumerate(world(3, _extremes)):
        shape = (3 * rank, DIM)
        assert found == [shape, shape, [True, True], EXPERTS, 0.0, torch.bfloat16]


def _operations(group: Group) -> list[int]:
    model = layer(group, torch.float32, top_k=2)
    x = tokens(group.rank, 20, torch.float32).requires_grad_()
    before = group.statistics()
    loss = model(x).sum()
    forward = group.statistics()
    loss.backward()
    backward = group.statistics()
    return [
        forward["num_operations"] - before["num_operations"],
        backward["num_operations"] - forward["num_operations"],
    ]


def test_a_layer_costs_two_exchanges_forward_and_two_backward(world):
    assert world(2, _operations) == [[3, 2]] * 2  # forward also the numbers of choices


class Experts(nn.Module):
    """Experts in the form of transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        generator = torch.Generator().manual_seed(7)
        shape = EXPERTS, DIM, DIM
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.up_proj = nn.Parameter(values)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        results = torch.einsum("td,tkhd->tkh", hidden_states, self.up_proj[top_k_index])
        return (results.relu() * top_k_weights.unsqueeze(-1)).sum(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(8)
        values = torch.randn(EXPERTS, DIM, generator=generator, dtype=torch.float64)
        self.router = nn.Parameter(values)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = functional.linear(x, self.router).softmax(-1).topk(2, -1)
        return x + self.experts(x, index, weights)


def _divided(group: Group) -> list[Any]:
    whole, model = Model(), Model()
    sums = [whole(tokens(rank, 6, torch.float64)).square().sum() for rank in range(group.size)]
    torch.stack(sums).mean().backward()
    names = divide_experts(model, group)
    again = said_by(lambda: divide_experts(model, group), ConfigError)
    model(tokens(group.rank, 6, torch.float64)).square().sum().backward()
    average_gradients(model, group)
    count = EXPERTS // group.size
    own = slice(group.rank * count, (group.rank + 1) * count)
    expected = whole.experts.up_proj.grad[own]
    gaps = [
        (model.experts.up_proj.grad - expected).abs().max() / expected.abs().max(),
        (model.router.grad - whole.router.grad).abs().max() / whole.router.grad.abs().max(),
    ]
    norm = torch.stack([param.grad.norm() for param in whole.parameters()]).norm()
    if group.size > 1:
        act = partial(nn.utils.clip_grad_norm_, model.parameters(), 1.0)
        assert "expert_parallel.clip_grad_norm_(model, max_norm, group)" in said_by(
            act, ConfigError
        )
    gaps.append(abs(clip_grad_norm_(model, 1.0, group) - norm) / norm)
    marked = [is_of_experts(param) for param in model.parameters()]
    undivide_experts(model, group)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the model is whole again
    x = tokens(0, 6, torch.float64)
    same = torch.equal(model(x), whole(x)) and model.experts.num_experts == EXPERTS
    return [names, again, max(gap.item() for gap in gaps) < 1e-12, marked, same]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_experts_of_a_model_are_divided_in_place(world, size):
    for found in world(size, _divided):
        assert found == [
            ["experts"],
            "ConfigError: the experts of experts are already sharded: call this function once per model",
            True,
            [False, size > 1],
            True,
        ]


def _refusals(group: Group) -> list[str]:
    model = layer(group, torch.float32)
    alone = group.split(group.rank)
    DistributedDataParallel(model, process_group=alone)  # of ranks that have the same experts
    return [
        said_by(lambda: DistributedDataParallel(model, process_group=group), ConfigError),
        said_by(lambda: MixtureOfExperts(4, 4, 9, group=group, top_k=0), ConfigError),
        said_by(lambda: MixtureOfExperts(4, 4, 4, group=group, capacity_factor=0), ConfigError),
        said_by(lambda: divide_experts(nn.ReLU(), group), ConfigError),
        said_by(lambda: auxiliary_loss(nn.ReLU()), ConfigError),
        said_by(lambda: clip_grad_norm_(nn.ReLU(), -1, group), ConfigError),
        said_by(lambda: braid.save("nowhere", model=model, step=0, group=group), ConfigError),
    ]


def test_what_cannot_be_divided_is_named(world):
    first, second = world(2, _refusals)
    assert first == second
    averaged, several, capacity, experts, routers, norm, saved = first
    assert "ranks [0, 1] have different experts in up, down, and DDP would average them" in averaged
    assert "9 experts cannot be divided over 2 ranks; valid: 1, 3, 9" in several
    assert "top_k must be from 1 to the number of experts, 9, got 0" in several
    assert "capacity_factor must be positive or None, got 0" in capacity
    assert "ReLU has no module of experts (a module with three-dimensional parameters" in experts
    assert "ReLU has no MixtureOfExperts" in routers
    assert "max_norm must not be negative" in norm
    assert "experts are sharded over ranks, and only this rank's experts would be saved" in saved
