"""A3C: actors compute gradients, and the learner applies them asynchronously.

    actor k:  weights v -> unroll -> gradients ─┐
    actor l:  weights w -> unroll -> gradients ─┴─> learner: clip, step, publish the next version

The learner does not wait for the slowest actor; a gradient may be of weights that are some versions
old, which the lag counts. Unlike in the paper, processes replace threads, the optimizer's
statistics are shared, and updates hold a lock.

Cost: per unroll the gradients there and the weights back, 4 bytes each per parameter.

Source: V. Mnih et al., "Asynchronous Methods for Deep Reinforcement Learning", ICML 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from braid.errors import ConfigError
from braid.rpc.rl.actor import Actor
from braid.rpc.rl.learner import Learner
from braid.rpc.rl.losses import LossOptions, a3c_loss
from braid.rpc.rl.policies import LocalPolicy, Weights

__all__ = ["A3CLearner", "play_a3c"]


class A3CLearner(Learner):
    """Takes gradients of actors; see `Learner` for its arguments."""

    def apply(
        self, gradients: Sequence[Tensor], version: int, steps: int, returns: Sequence[float]
    ) -> Weights | None:
        """Take a step with an actor's gradients; return the new weights, None if training is over.

        Args:
            gradients: Gradients, one for each parameter of the module.
            version: Version of the weights used to compute the gradients.
            steps: Number of environment steps in the unroll.
            returns: Returns of the episodes that ended in the unroll.

        Raises:
            ConfigError: Shapes do not match the parameters: the actor has another module.
        """
        params = list(self.module.parameters())
        expected, got = [tuple(p.shape) for p in params], [tuple(g.shape) for g in gradients]
        if expected != got:
            msg = (
                f"the actor's module has parameters of shapes {got}, but the learner's has "
                f"{expected}: make both modules with the same class and arguments"
            )
            raise ConfigError(msg)
        with self._changed:
            if self._is_over:
                return None
            self._record(version, steps, returns)
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient.clone()  # which may be a view of a message
            self._update()
            self._changed.notify_all()
            return self._weights

    def step(self, timeout_s: float | None = None) -> None:
        """Wait for the next update, which an actor's call of `apply` makes; see `Learner.step`."""
        with self._changed:
            before = self._weights.version
            self._wait_for(lambda: self._weights.version != before, timeout_s)


def play_a3c(learner: Any, actor: Actor, options: LossOptions | None = None) -> None:
    """Play environments, and send gradients to the learner, until training is over.

    Args:
        learner: The learner, or a proxy of it: `reference.rpc_sync(0)`.
        actor: Actor with a `LocalPolicy`.
        options: Choices of the loss.
    """
    policy = actor.policy
    if not isinstance(policy, LocalPolicy):
        msg = (
            f"A3C computes gradients in the actor's process: pass a LocalPolicy, got {type(policy)}"
        )
        raise ConfigError(msg)
    params = list(policy.module.parameters())
    weights = learner.weights()
    while weights is not None:
        policy.load(weights)
        unroll = actor.unroll()
        loss = a3c_loss(policy.module, unroll, options or LossOptions())
        gradients = torch.autograd.grad(loss, params)
        weights = learner.apply(list(gradients), unroll.version, unroll.num_steps, unroll.returns)
