"""Choices of experts, capacities and losses of a router, without ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.parallel.expert_parallel.routing import (
    capacity_of,
    keep_within,
    load_balance_loss,
    route,
    router_z_loss,
)


def _routing(tokens: int, experts: int, top_k: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 3, generator=generator, dtype=torch.float64)
    return route(x, torch.randn(experts, 3, generator=generator, dtype=torch.float64), top_k)


@given(tokens=st.integers(0, 9), experts=st.integers(1, 5), seed=st.integers(0, 99), data=st.data())
def test_tokens_go_to_their_most_probable_experts(tokens, experts, seed, data):
    top_k = data.draw(st.integers(1, experts))
    routing = _routing(tokens, experts, top_k, seed)
    best = routing.probabilities.topk(top_k, -1)
    assert torch.equal(routing.experts, best.indices)
    total = routing.weights.sum(-1)
    expected = best.values.sum(-1) if top_k == 1 else torch.ones(tokens, dtype=torch.float64)
    torch.testing.assert_close(total, expected)


def test_of_equal_probabilities_the_first_expert_is_chosen():
    routing = route(torch.zeros(2, 3), torch.ones(5, 3), 2)
    assert routing.experts.tolist() == [[0, 1], [0, 1]]


@given(
    rows=st.lists(st.permutations(range(4)), max_size=12),
    top_k=st.integers(1, 4),
    capacity=st.integers(0, 9),
)
def test_an_expert_keeps_first_choices_of_early_tokens(rows, top_k, capacity):
    experts = torch.tensor([row[:top_k] for row in rows], dtype=torch.int64).view(-1, top_k)
    taken = [0] * 4
    expected = [[False] * top_k for _ in rows]
    for choice in range(top_k):
        for token, row in enumerate(rows):
            expected[token][choice] = taken[row[choice]] < capacity
            taken[row[choice]] += 1
    assert keep_within(experts, 4, capacity).tolist() == expected


@given(
    choices=st.integers(0, 50),
    experts=st.integers(1, 9),
    factor=st.none() | st.floats(0.1, 9),
)
def test_a_capacity_is_the_even_share_times_its_factor(choices, experts, factor):
    capacity = capacity_of(choices, experts, factor)
    limit = choices if factor is None else math.ceil(factor * choices / experts)
    assert capacity == min(choices, limit)


def test_an_even_load_has_a_balance_loss_of_one():
    routing = route(torch.eye(4) * 50, torch.eye(4), 1)  # each token to an expert of its own
    counts = routing.experts.flatten().bincount(minlength=4)[None]
    assert load_balance_loss(routing, counts).item() == pytest.approx(1)
    one = route(torch.ones(6, 4) * 50, torch.eye(4)[:, :1].expand(4, 4) * 9, 1)
    counts = one.experts.flatten().bincount(minlength=4)[None]
    assert load_balance_loss(one, counts).item() == pytest.approx(4)  # all tokens to one expert


@given(tokens=st.integers(1, 9), experts=st.integers(1, 5), seed=st.integers(0, 99))
def test_losses_of_routers_are_their_formulas(tokens, experts, seed):
    routing = _routing(tokens, experts, 1, seed)
    counts = routing.experts.flatten().bincount(minlength=experts)
    shares, means = counts / tokens, routing.probabilities.mean(0)
    expected = experts * (shares * means).sum()
    torch.testing.assert_close(load_balance_loss(routing, counts[None]), expected)
    squares = routing.logits.exp().sum(-1).log() ** 2
    torch.testing.assert_close(router_z_loss(routing, counts[None]), squares.mean())
