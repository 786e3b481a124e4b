"""IMPALA: actors send unrolls, and the learner corrects for the policy that played them.

    actors ── unrolls ──> queue ──> batch (+ replay) ──> V-trace, step ──> next version
       <── newest weights, when the queue has room

An actor plays its next unroll while the last one travels. The answer to an unroll waits while too
many others wait to be learned from, so that actors do not run ahead of the learner.

Source: L. Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
Actor-Learner Architectures", ICML 2018; section 5.2.2 mixes fresh unrolls with replayed ones
(L. Lin, "Self-improving reactive agents based on reinforcement learning, planning and teaching",
1992).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from braid.comm import Group
from braid.errors import ConfigError
from braid.rpc.functions import async_execution
from braid.rpc.rl.actor import Actor, Unroll
from braid.rpc.rl.averaging import GradientAverage
from braid.rpc.rl.learner import Learner
from braid.rpc.rl.losses import LossOptions, impala_loss, join_unrolls
from braid.rpc.rl.policies import Policy, Weights

__all__ = ["ImpalaLearner", "Replay", "play_impala"]

Answer = torch.futures.Future  # of weights, or None at the end


class Replay:
    """Buffer of the newest unrolls, from which batches are drawn uniformly.

    Args:
        capacity: Maximum number of unrolls; the oldest one is removed first.
        seed: Seed of the draws.

    Raises:
        ConfigError: The capacity is below 1.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        if capacity < 1:
            msg = f"the capacity of a replay must be at least 1 unroll, got {capacity}"
            raise ConfigError(msg)
        self._capacity = capacity
        self._unrolls: list[Unroll] = []
        self._next = 0  # place of the next unroll when full
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        """Return the number of unrolls."""
        return len(self._unrolls)

    def add(self, unroll: Unroll) -> None:
        """Add an unroll to the buffer."""
        if len(self._unrolls) < self._capacity:
            self._unrolls.append(unroll)
        else:
            self._unrolls[self._next] = unroll
            self._next = (self._next + 1) % self._capacity

    def sample(self, count: int) -> list[Unroll]:
        """Draw `count` unrolls with replacement; none from an empty replay."""
        if not self._unrolls:
            return []
        drawn = torch.randint(len(self._unrolls), (count,), generator=self._generator)
        return [self._unrolls[index] for index in drawn.tolist()]


class ImpalaLearner(Learner):
    """IMPALA learner: updates the policy with unrolls of actors, corrected by V-trace.

    Args:
        module: Module of the policy, owned by this object.
        optimizer: Optimizer of its parameters.
        options: Choices of the loss.
        batch_size: Number of unrolls in a step.
        capacity: Number of unrolls that may wait; above it, answers to actors are delayed. Twice
            the batch size when None.
        replay: Buffer of old unrolls to learn from again; None for no replay.
        num_replayed: Number of replayed unrolls in each step, beside the batch.
        max_grad_norm: Bound of the norm of all gradients.
        group: Group of several learners, each with its actors, that average their gradients; all
            construct their learner together. None for one learner.
        serving: Policies of this process that get each new version.

    Raises:
        ConfigError: A number is out of its range.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        options: LossOptions | None = None,
        *,
        batch_size: int = 1,
        capacity: int | None = None,
        replay: Replay | None = None,
        num_replayed: int = 0,
        max_grad_norm: float = 0.5,
        group: Group | None = None,
        serving: Iterable[Policy] = (),
    ) -> None:
        self._average = None if group is None else GradientAverage(group, module)
        super().__init__(module, optimizer, max_grad_norm=max_grad_norm, serving=serving)
        capacity = 2 * batch_size if capacity is None else capacity
        if batch_size < 1 or capacity < batch_size:
            msg = (
                "batch_size must be at least 1, and capacity at least batch_size, got batch_size "
                f"{batch_size} and capacity {capacity}"
            )
            raise ConfigError(msg)
        if num_replayed < 0 or (num_replayed and replay is None):
            msg = f"num_replayed={num_replayed} needs a replay: pass replay=Replay(...)"
            raise ConfigError(msg)
        self._options = options or LossOptions()
        self._batch_size = batch_size
        self._capacity = capacity
        self._replay = replay
        self._num_replayed = num_replayed
        self._waiting: deque[Unroll] = deque()
        self._unanswered: list[tuple[Answer[Weights | None], int]] = []

    @async_execution
    def add(self, unroll: Unroll) -> Answer[Weights | None]:
        """Add an actor's unroll; answer with the newest weights once more unrolls have room."""
        future: Answer[Weights | None] = Answer()
        with self._changed:
            self._waiting.append(unroll)
            self._unanswered.append((future, unroll.version))
            self._changed.notify_all()
        self._answer()
        return future

    def step(self, timeout_s: float | None = None) -> None:
        """Wait for a batch of unrolls, and update the weights with it; see `Learner.step`."""
        with self._changed:
            if not self._wait_for(lambda: len(self._waiting) >= self._batch_size, timeout_s):
                return
            fresh = [self._waiting.popleft() for _ in range(self._batch_size)]
            for unroll in fresh:
                self._record(unroll.version, unroll.num_steps, unroll.returns)
        again = [] if self._replay is None else self._replay.sample(self._num_replayed)
        self._optimizer.zero_grad()
        batch = join_unrolls([*fresh, *again])
        torch.autograd.backward([impala_loss(self.module, batch, self._options)])
        if self._average is not None and not self._average.average(batch.num_steps):
            self._end()
            return
        self._update()
        if self._replay is not None:
            for unroll in fresh:
                self._replay.add(unroll)
        self._answer()

    def stop(self) -> None:
        """End training: actors get None instead of weights. Idempotent.

        With a group, all learners end: waits for the next step of each.
        """
        if self._average is not None and not self._is_over:
            self._average.end()
        self._end()

    def _end(self) -> None:
        super().stop()
        self._answer()

    def _answer(self) -> None:
        """Answer all unrolls if there is room for more."""
        with self._changed:
            if len(self._waiting) > self._capacity and not self._is_over:
                return
            answers, self._unanswered = self._unanswered, []
        for future, version in answers:
            future.set_result(self.weights(version))


def play_impala(learner: Any, actor: Actor) -> None:
    """Play environments, and send unrolls to the learner, until training is over.

    Args:
        learner: The learner, or a proxy of it: `reference.rpc_async(0)`.
        actor: Actor that plays.
    """
    weights = _result(learner.weights())
    on_the_way: Answer[Weights | None] | None = None
    while weights is not None:
        actor.policy.load(weights)
        unroll = actor.unroll()
        if on_the_way is not None:
            weights = on_the_way.wait()
        on_the_way = learner.add(unroll)


def _result(value: Any) -> Any:
    return value.wait() if isinstance(value, torch.futures.Future) else value
