"""Distributions of actions: a number of a finite set, or a vector of real numbers.

    module(observations) -> (logits, values)             action n with probability softmax(logits)_n
    module(observations) -> (Gaussian(m, s), values)     action m + exp(s) * noise, noise ~ N(0, 1)

Source: R. Williams, "Simple statistical gradient-following algorithms for connectionist
reinforcement learning", 1992, section 6, for the Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["Gaussian", "Outputs", "entropy_of", "log_probs_of", "sample", "stacked", "without_last"]

HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


class Gaussian(NamedTuple):
    """Independent normal distributions of the numbers of an action, returned by a module.

    Actions are not clipped: an environment with bounds clips them.

    Attributes:
        mean: Means, [..., A].
        log_std: Logarithms of the standard deviations, [..., A].
    """

    mean: Tensor
    log_std: Tensor


Outputs: TypeAlias = "Tensor | Gaussian"


def sample(outputs: Outputs, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return an action for each row of outputs, with the logarithm of its probability.

    Args:
        outputs: Logits [B, A], or a Gaussian of shape [B, A].
        generator: Generator of the choices.

    Returns:
        Actions [B] or [B, A], and logarithms of probabilities or densities [B].
    """
    if isinstance(outputs, Gaussian):
        noise = torch.randn(outputs.mean.shape, generator=generator, dtype=outputs.mean.dtype).to(
            outputs.mean.device
        )
        actions = outputs.mean + outputs.log_std.exp() * noise
        return actions, log_probs_of(outputs, actions)
    log_probs = outputs.log_softmax(-1)
    actions = torch.multinomial(log_probs.exp(), 1, generator=generator)
    return actions.squeeze(-1), log_probs.gather(-1, actions).squeeze(-1)


def log_probs_of(outputs: Outputs, actions: Tensor) -> Tensor:
    """Return the logarithms of the probabilities (densities) of actions, [...]."""
    if isinstance(outputs, Gaussian):
        noise = (actions - outputs.mean) * (-outputs.log_std).exp()
        return -(0.5 * noise.square() + outputs.log_std + HALF_LOG_2_PI).sum(-1)
    return outputs.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def entropy_of(outputs: Outputs) -> Tensor:
    """Return the entropies of distributions, [...]."""
    if isinstance(outputs, Gaussian):
        return (0.5 + HALF_LOG_2_PI + outputs.log_std).expand_as(outputs.mean).sum(-1)
    log_probs = outputs.log_softmax(-1)
    least = torch.finfo(log_probs.dtype).min  # 0 log 0 is 0, for actions with logits of -inf
    return -(log_probs.exp() * log_probs.clamp(min=least)).sum(-1)


def without_last(outputs: Outputs) -> Outputs:
    """Return the outputs of all steps but the last one."""
    if isinstance(outputs, Gaussian):
        return Gaussian(outputs.mean[:-1], outputs.log_std.expand_as(outputs.mean)[:-1])
    return outputs[:-1]


def stacked(steps: Sequence[Outputs]) -> Outputs:
    """Return the outputs of several steps as one, with a new first dim."""
    gaussians = [step for step in steps if isinstance(step, Gaussian)]
    if not gaussians:
        return torch.stack([step for step in steps if isinstance(step, Tensor)])
    log_stds = [step.log_std.expand_as(step.mean) for step in gaussians]
    return Gaussian(torch.stack([step.mean for step in gaussians]), torch.stack(log_stds))
