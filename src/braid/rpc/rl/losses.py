"""Losses of actor and critic from one unroll.

    loss = - mean(log pi(a) A) + value_cost mean((target - V)^2) / 2 - entropy_cost mean(H(pi))

`a3c_loss` uses advantages of the acting policy, `impala_loss` uses V-trace.

Sources: V. Mnih et al., ICML 2016, section 4; L. Espeholt et al., ICML 2018, section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from braid.errors import ConfigError
from braid.rpc.rl.actions import Outputs, entropy_of, log_probs_of, without_last
from braid.rpc.rl.actor import Unroll
from braid.rpc.rl.recurrence import unrolled
from braid.rpc.rl.targets import Steps, advantages, vtrace

__all__ = ["LossOptions", "a3c_loss", "impala_loss", "join_unrolls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """Options of the loss of an actor-critic, such as discount and weights of its terms.

    Attributes:
        discount: Factor by which a reward one step later counts less.
        entropy_cost: Weight of the policy's entropy, which keeps it exploring.
        value_cost: Weight of the value function's error.
        lambda_: Weight of later steps in targets.
        rho_bar: Bound of importance weights; of V-trace only.
        c_bar: Bound of the weights of later steps; of V-trace only.
    """

    discount: float = 0.99
    entropy_cost: float = 0.01
    value_cost: float = 0.5
    lambda_: float = 1.0
    rho_bar: float = 1.0
    c_bar: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not (0 <= self.discount <= 1 and 0 <= self.lambda_ <= 1):
            msg = (
                "discount and lambda_ must be between 0 and 1, got "
                f"{self.discount} and {self.lambda_}"
            )
            raise ConfigError(msg)


class _Evaluation(NamedTuple):
    """Outputs of a module for an unroll; each tensor is [T, B]."""

    log_probs: Tensor
    entropy: Tensor
    values: Tensor
    steps: Steps


def a3c_loss(module: nn.Module, unroll: Unroll, options: LossOptions) -> Tensor:
    """Return the loss of the policy that has played the unroll."""
    log_probs, entropy, values, steps = _evaluate(module, unroll, options.discount)
    gains = advantages(steps, lambda_=options.lambda_)
    return _loss(log_probs, gains, steps.values + gains - values, entropy, options)


def impala_loss(module: nn.Module, unroll: Unroll, options: LossOptions) -> Tensor:
    """Return the loss of a policy for an unroll that an older one has played."""
    log_probs, entropy, values, steps = _evaluate(module, unroll, options.discount)
    targets, gains = vtrace(
        log_probs.detach() - unroll.log_probs,
        steps,
        rho_bar=options.rho_bar,
        c_bar=options.c_bar,
        lambda_=options.lambda_,
    )
    return _loss(log_probs, gains, targets - values, entropy, options)


def join_unrolls(unrolls: Sequence[Unroll]) -> Unroll:
    """Concatenate unrolls of equal length into one batch over all environments."""
    lengths = {len(unroll.actions) for unroll in unrolls}
    if len(lengths) != 1:
        msg = (
            f"unrolls of one batch must have one length, got lengths {sorted(lengths)} in steps: "
            "use one unroll_length"
        )
        raise ConfigError(msg)
    if len(unrolls) == 1:
        return unrolls[0]
    states = [unroll.state for unroll in unrolls if unroll.state is not None]
    if len(states) not in (0, len(unrolls)):
        msg = (
            f"{len(states)} of {len(unrolls)} unrolls have a state: use a recurrent policy in all "
            "actors of a learner, or in none"
        )
        raise ConfigError(msg)
    return Unroll(
        torch.cat([unroll.observations for unroll in unrolls], 1),
        torch.cat([unroll.actions for unroll in unrolls], 1),
        torch.cat([unroll.log_probs for unroll in unrolls], 1),
        torch.cat([unroll.rewards for unroll in unrolls], 1),
        torch.cat([unroll.terminated for unroll in unrolls], 1),
        torch.cat([unroll.truncated for unroll in unrolls], 1),
        torch.cat([unroll.last_observations for unroll in unrolls]),
        tuple(value for unroll in unrolls for value in unroll.returns),
        min(unroll.version for unroll in unrolls),
        torch.cat(states) if states else None,
    )


def _evaluate(module: nn.Module, unroll: Unroll, discount: float) -> _Evaluation:
    outputs, values, last_values = _outputs(module, unroll)
    outputs = without_last(outputs)
    with torch.no_grad():
        next_values = values[1:].clone()
        if last_values is not None:
            next_values.T[unroll.truncated.T] = last_values
        steps = Steps(
            unroll.rewards,
            discount * (~unroll.terminated).to(unroll.rewards.dtype),
            unroll.terminated | unroll.truncated,
            values[:-1].detach(),
            next_values,
        )
    chosen = log_probs_of(outputs, unroll.actions)
    return _Evaluation(chosen, entropy_of(outputs), values[:-1], steps)


def _outputs(module: nn.Module, unroll: Unroll) -> tuple[Outputs, Tensor, Tensor | None]:
    """Return outputs and values of x_0 to x_T, and values of the last observations."""
    last = unroll.last_observations
    if unroll.state is None:
        outputs, values = module(unroll.observations)
        with torch.no_grad():
            return outputs, values, module(last)[1] if len(last) else None
    ends = unroll.terminated | unroll.truncated
    outputs, values, states = unrolled(module, unroll.observations, unroll.state, ends)
    with torch.no_grad():
        before = states[:-1].transpose(0, 1)[unroll.truncated.T]
        return outputs, values, module(last, before)[1] if len(last) else None


def _loss(
    log_probs: Tensor, gains: Tensor, errors: Tensor, entropy: Tensor, options: LossOptions
) -> Tensor:
    policy = -(log_probs * gains).mean()
    value = options.value_cost * errors.square().mean() / 2
    return policy + value - options.entropy_cost * entropy.mean()
