"""Targets equal their definitions, term by term."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.rpc.rl import Steps, advantages, vtrace


def steps_of(seed: int, length: int, width: int) -> Steps:
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> torch.Tensor:
        return torch.rand(length, width, generator=generator, dtype=torch.float64)

    terminated, truncated = uniform() < 0.2, uniform() < 0.2
    ends, values, next_values = terminated | truncated, uniform(), uniform()
    next_values[:-1] = torch.where(ends[:-1], next_values[:-1], values[1:])
    return Steps(uniform(), 0.9 * (~terminated).double(), ends, values, next_values)


def defined_vtrace(log_rhos, steps, rho_bar, c_bar, t, b):
    """The sum of the paper (equation 1), up to the end of unroll and episode."""
    total, weight = steps.values[t, b], 1.0
    for s in range(t, len(log_rhos)):
        ratio = log_rhos[s, b].exp()
        delta = steps.rewards[s, b] + steps.discounts[s, b] * steps.next_values[s, b]
        total = total + weight * min(rho_bar, ratio) * (delta - steps.values[s, b])
        weight = weight * steps.discounts[s, b] * min(c_bar, ratio)
        if steps.ends[s, b]:
            break
    return total


SIZES = {
    "seed": st.integers(0, 1000),
    "length": st.integers(1, 6),
    "width": st.integers(1, 3),
}


@given(**SIZES, rho_bar=st.sampled_from([0.5, 1.0, 2.0]), c_bar=st.sampled_from([0.5, 1.0]))
def test_vtrace_is_the_sum_of_the_paper(seed, length, width, rho_bar, c_bar):
    steps = steps_of(seed, length, width)
    log_rhos = torch.randn(
        length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    got = vtrace(log_rhos, steps, rho_bar=rho_bar, c_bar=c_bar)
    expected = torch.tensor(
        [
            [defined_vtrace(log_rhos, steps, rho_bar, c_bar, t, b) for b in range(width)]
            for t in range(length)
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(got.targets, expected)
    following = torch.cat([expected[1:], steps.next_values[-1:]])
    following = torch.where(steps.ends, steps.next_values, following)
    weights = log_rhos.exp().clamp(max=rho_bar)
    gains = weights * (steps.rewards + steps.discounts * following - steps.values)
    torch.testing.assert_close(got.advantages, gains)


@given(**SIZES)
def test_vtrace_of_the_policy_that_played_is_its_n_step_return(seed, length, width):
    steps = steps_of(seed, length, width)
    got = vtrace(torch.zeros(length, width, dtype=torch.float64), steps)
    torch.testing.assert_close(got.targets, steps.values + advantages(steps))


@given(**SIZES)
def test_advantages_with_lambda_0_are_errors_of_one_step(seed, length, width):
    steps = steps_of(seed, length, width)
    deltas = steps.rewards + steps.discounts * steps.next_values - steps.values
    torch.testing.assert_close(advantages(steps, lambda_=0.0), deltas)


def test_steps_of_other_shapes_are_refused():
    steps = steps_of(0, 3, 2)
    with pytest.raises(ConfigError, match=r"one shape \[T, B\].*\(2, 2\)"):
        vtrace(torch.zeros(2, 2), steps)
    with pytest.raises(ConfigError, match="T >= 1"):
        advantages(Steps(*(each[:0] for each in steps)))
