"""Policies choose actions with a version of the weights.

A module maps observations [..., *obs] to logits [..., actions] and values [...]. An actor's policy
is a local copy of it (`LocalPolicy`), or a served one, called in each step (`serving`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from braid.rpc import register

__all__ = ["Decision", "LocalPolicy", "Policy", "Weights", "sample", "weights_of"]


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
        actions: Actions, [B].
        log_probs: Logarithms of their probabilities, [B].
        version: Version of the weights that chose them.
    """

    actions: Tensor
    log_probs: Tensor
    version: int


class Policy(Protocol):
    """Interface of policies: chooses an action for each observation."""

    def decide(self, observations: Tensor) -> Decision:
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
        self.version = 0
        self._is_loaded = False  # the first weights have version 0, too
        self._generator = torch.Generator().manual_seed(seed)

    def decide(self, observations: Tensor) -> Decision:
        """Choose an action for each observation."""
        with torch.no_grad():
            logits, _ = self.module(observations)
        return Decision(*sample(logits, self._generator), self.version)

    def load(self, weights: Weights) -> None:
        """Load weights; does nothing if this version is loaded already."""
        if weights.version != self.version or not self._is_loaded:
            load_weights(self.module, weights.state)
            self.version, self._is_loaded = weights.version, True


def sample(logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return an action for each row of logits [B, A], with the logarithm of its probability."""
    log_probs = logits.log_softmax(-1)
    actions = torch.multinomial(log_probs.exp(), 1, generator=generator)
    return actions.squeeze(-1), log_probs.gather(-1, actions).squeeze(-1)


def weights_of(module: nn.Module, version: int) -> Weights:
    """Return a copy of the weights of a module."""
    return Weights(version, {k: v.detach().clone() for k, v in module.state_dict().items()})


def load_weights(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy weights into a module."""
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(state[name])
