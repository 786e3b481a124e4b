"""Targets of value functions and advantages of policies, from unrolls of experience.

Problem: an unroll ends before its episodes do, and was played by a policy that the learner has
changed since. Its rewards are returns of another policy.

    advantages   A_t = d_t + g_t l A_{t+1},  d_t = r_t + g_t V(x_{t+1}) - V(x_t)      same policy
    vtrace       v_t = V(x_t) + rho_t d_t + g_t c_t (v_{t+1} - V(x_{t+1}))            older policy
                 rho_t = min(rho_bar, pi/mu),  c_t = l min(c_bar, pi/mu)

With l = 1, values plus `advantages` are the n-step returns of A3C, and so are the targets of
V-trace where pi = mu. An episode that was cut off (truncated) still has a value of its last state,
but no next step.

Cost: O(T B); the loop over T runs on vectors of B.

Sources: V. Mnih et al., "Asynchronous Methods for Deep Reinforcement Learning", ICML 2016;
J. Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
ICLR 2016; L. Espeholt et al., "IMPALA", ICML 2018, section 4.1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from braid.errors import ConfigError

__all__ = ["Steps", "VTrace", "advantages", "vtrace"]


class Steps(NamedTuple):
    """T consecutive steps of B environments, as needed to compute targets.

    Shape: all tensors are [T, B].

    Attributes:
        rewards: Rewards r_t.
        discounts: Discounts g_t, 0 where the episode has terminated.
        ends: Whether step t was the last one of its episode, terminated or truncated.
        values: Values V(x_t).
        next_values: Values V(x_{t+1}), in an ended episode of its last state.
    """

    rewards: torch.Tensor
    discounts: torch.Tensor
    ends: torch.Tensor
    values: torch.Tensor
    next_values: torch.Tensor


class VTrace(NamedTuple):
    """Targets of the value function and the policy by V-trace.

    Attributes:
        targets: Targets of the value function, v_t.
        advantages: Weights of the policy gradient, rho_t (r_t + g_t v_{t+1} - V(x_t)).
    """

    targets: torch.Tensor
    advantages: torch.Tensor


def advantages(steps: Steps, *, lambda_: float = 1.0) -> torch.Tensor:
    """Return generalized advantages (GAE) for an unroll of the same policy.

    Args:
        steps: Steps of the unroll.
        lambda_: Weight l of later steps: 0 for one step, 1 for all.

    Raises:
        ConfigError: Shapes differ.
    """
    _check(*steps)
    deltas = steps.rewards + steps.discounts * steps.next_values - steps.values
    return _accumulate(deltas, lambda_ * steps.discounts, steps.ends)


def vtrace(
    log_rhos: torch.Tensor,
    steps: Steps,
    *,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    lambda_: float = 1.0,
) -> VTrace:
    """Return V-trace targets for a policy from an unroll of an older policy.

    Args:
        log_rhos: Logarithms of pi(a_t) / mu(a_t), [T, B].
        steps: Steps of the unroll.
        rho_bar: Bound of the weights in each step, which determines the policy that is evaluated.
        c_bar: Bound of the weights of later steps, which determines the speed of convergence.
        lambda_: Weight l of later steps.

    Raises:
        ConfigError: Shapes differ.
    """
    _check(log_rhos, *steps)
    rewards, discounts, ends, values, next_values = steps
    ratios = log_rhos.exp()
    rhos = ratios.clamp(max=rho_bar)
    deltas = rhos * (rewards + discounts * next_values - values)
    corrections = _accumulate(deltas, lambda_ * ratios.clamp(max=c_bar) * discounts, ends)
    later = torch.cat([corrections[1:], torch.zeros_like(corrections[:1])]).masked_fill(ends, 0.0)
    next_targets = next_values + later
    return VTrace(values + corrections, rhos * (rewards + discounts * next_targets - values))


def _accumulate(deltas: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return s with s_t = deltas_t + weights_t s_{t+1}, where s_{t+1} is 0 after an end."""
    weights = weights.masked_fill(ends, 0.0)
    sums = torch.empty_like(deltas)
    later = torch.zeros_like(deltas[0])
    for step in range(len(deltas) - 1, -1, -1):
        later = deltas[step] + weights[step] * later
        sums[step] = later
    return sums


def _check(*tensors: torch.Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) != 1 or len(shapes[0]) < 1 or not shapes[0][0]:
        msg = f"the tensors of steps must have one shape [T, B] with T >= 1, got {shapes}"
        raise ConfigError(msg)
