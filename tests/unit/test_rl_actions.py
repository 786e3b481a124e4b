"""Distributions of actions have the densities and entropies of torch.distributions."""

from __future__ import annotations

import torch
from torch.distributions import Categorical, Independent, Normal

from braid.rpc.rl import Gaussian
from braid.rpc.rl.actions import entropy_of, log_probs_of, sample, stacked, without_last


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_densities_and_entropies_are_those_of_torch():
    mean, log_std = torch.randn(2, 5, 3, generator=generator()).unbind()
    normal = Independent(Normal(mean, log_std.exp()), 1)
    actions, log_probs = sample(Gaussian(mean, log_std), generator())
    assert actions.shape == (5, 3)
    torch.testing.assert_close(log_probs, normal.log_prob(actions))
    torch.testing.assert_close(entropy_of(Gaussian(mean, log_std)), normal.entropy())
    actions, log_probs = sample(mean, generator())
    torch.testing.assert_close(log_probs, Categorical(logits=mean).log_prob(actions))
    torch.testing.assert_close(entropy_of(mean), Categorical(logits=mean).entropy())


def test_one_standard_deviation_for_all_steps_counts_in_each():
    mean, log_std = torch.randn(4, 5, 3, generator=generator()), torch.tensor([0.1, -1.0, 0.5])
    wide = Gaussian(mean, log_std.expand_as(mean))
    actions, _ = sample(wide, generator())
    narrow = Gaussian(mean, log_std)
    assert torch.equal(log_probs_of(narrow, actions), log_probs_of(wide, actions))
    assert torch.equal(entropy_of(narrow), entropy_of(wide))
    assert torch.equal(without_last(narrow).log_std, wide.log_std[:-1])
    steps = [Gaussian(part, log_std) for part in mean]
    assert all(map(torch.equal, stacked(steps), wide))
    assert torch.equal(stacked([*mean]), mean)
