"""A served policy, which answers many actors with one forward pass.

    actor 0: observations [B, ...] ─┐
    actor 1: observations [B, ...] ─┼─> one forward pass ─> actions for each
    actor 2: observations [B, ...] ─┘   when all have asked, or after max_wait_s

Actors need no weights then, and always act by the newest ones; each of their steps is a call.

Source: L. Espeholt et al., "SEED RL: Scalable and Efficient Deep-RL with Accelerated Central
Inference", ICLR 2020.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from braid.errors import ConfigError
from braid.rpc import RRef, batch
from braid.rpc.rl.policies import Decision, LocalPolicy, Weights

__all__ = ["PolicyServer", "ServedPolicy"]


class PolicyServer:
    """A policy that chooses actions for remote actors, which use `ServedPolicy(RRef(server))`.

    Args:
        module: Module of the policy, owned by this object; the learner has another one.
        max_size: Maximum number of actors in one forward pass.
        max_wait_s: Seconds that the first actor waits for others.
        seed: Seed of its choices.

    Raises:
        ConfigError: The module is recurrent.
    """

    def __init__(
        self, module: nn.Module, *, max_size: int, max_wait_s: float = 0.002, seed: int = 0
    ) -> None:
        self._policy = LocalPolicy(module, seed)
        if self._policy.state_shape is not None:
            msg = "a served policy has no states of its actors: use LocalPolicy with this module"
            raise ConfigError(msg)
        self._lock = threading.Lock()
        self.decide = batch(max_size, max_wait_s)(self._decide)
        self.num_batches = 0

    def load(self, weights: Weights) -> None:
        """Use newer weights from now on."""
        with self._lock:
            self._policy.load(weights)

    def _decide(self, observations: list[Tensor]) -> list[Decision]:
        sizes = [len(batch) for batch in observations]
        with self._lock:
            self.num_batches += 1
            actions, log_probs, version, _ = self._policy.decide(torch.cat(observations))
        parts = zip(torch.split(actions, sizes), torch.split(log_probs, sizes), strict=True)
        return [Decision(*of_one, version) for of_one in parts]


class ServedPolicy:
    """Policy with actions that a `PolicyServer` in another node computes.

    Args:
        server: Reference to a `PolicyServer`.
    """

    def __init__(self, server: RRef) -> None:
        self._server = server

    def decide(self, observations: Tensor, state: Tensor | None = None) -> Decision:
        """Choose an action for each observation."""
        del state  # a server refuses recurrent modules
        decision: Any = self._server.rpc_sync().decide(observations)
        return Decision(*decision)

    def load(self, weights: Weights) -> None:
        """Do nothing: the server has the newest weights."""
