"""Policies choose actions with a version of the weights.

A module maps observations [..., *obs] to logits [..., actions] and values [...], or to a `Gaussian`
and values. A recurrent one also maps states (`recurrence`). An actor's policy is a local copy of it
(`LocalPolicy`), or a served one, called in each step (`serving`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from braid.errors import ConfigError
from braid.rpc import register
from braid.rpc.rl.actions import sample
from braid.rpc.rl.recurrence import state_shape_of

__all__ = ["Decision", "LocalPolicy", "Policy", "Weights", "weights_of"]


@register
class Weights(NamedTuple):
    """Weights of a policy, with their version.

    Attributes:
        version: Number of updates that have made them.
        state: State of the module by name; its tensors are not modified.
    """

    version: int
    state: dict[str, Tensor]


@register
class Decision(NamedTuple):
    """Actions that a policy has chosen for a batch of observations.

    Attributes:
        actions: Actions, [B], or [B, A] of a Gaussian.
        log_probs: Logarithms of their probabilities, [B].
        version: Version of the weights that chose them.
        state: States of a recurrent policy after the step, [B, ...]; None for other policies.
    """

    actions: Tensor
    log_probs: Tensor
    version: int
    state: Tensor | None = None


class Policy(Protocol):
    """Interface of policies: chooses an action for each observation.

    A policy with an attribute `state_shape` is recurrent: `decide` gets states, too.
    """

    def decide(self, observations: Tensor, state: Tensor | None = None) -> Decision:
        """Choose an action for each observation of a batch."""

    def load(self, weights: Weights) -> None:
        """Use newer weights from now on."""


class LocalPolicy:
    """A policy with weights in this process.

    Args:
        module: Module of the policy, owned by this object.
        seed: Seed of its choices.
    """

    def __init__(self, module: nn.Module, seed: int) -> None:
        self.module = module
        self.state_shape = state_shape_of(module)
        self.version = 0
        self._is_loaded = False  # the first weights have version 0, too
        self._generator = torch.Generator().manual_seed(seed)

    def decide(self, observations: Tensor, state: Tensor | None = None) -> Decision:
        """Choose an action for each observation.

        Args:
            observations: Observations, [B, ...].
            state: States of a recurrent policy before the step, [B, ...].

        Raises:
            ConfigError: The policy is recurrent and there is no state, or the other way round.
        """
        if (state is None) != (self.state_shape is None):
            msg = (
                f"{type(self.module).__qualname__} has state_shape={self.state_shape}, but the "
                f"state is {'missing' if state is None else tuple(state.shape)}: a module with "
                "state_shape is recurrent, and needs an Actor with a LocalPolicy"
            )
            raise ConfigError(msg)
        with torch.no_grad():
            if state is None:
                outputs, _ = self.module(observations)
            else:
                outputs, _, state = self.module(observations, state)
            choice = sample(outputs, self._generator)
        return Decision(*choice, self.version, state)

    def load(self, weights: Weights) -> None:
        """Load weights; does nothing if this version is loaded already."""
        if weights.version != self.version or not self._is_loaded:
            load_weights(self.module, weights.state)
            self.version, self._is_loaded = weights.version, True


def weights_of(module: nn.Module, version: int) -> Weights:
    """Return a copy of the weights of a module."""
    return Weights(version, {k: v.detach().clone() for k, v in module.state_dict().items()})


def load_weights(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy weights into a module."""
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(state[name])
