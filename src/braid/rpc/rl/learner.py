"""A learner's weights with their versions, its actors, and the lag between them.

    actor: plays with version v ───── unroll or gradients ─────> learner: is at version w
           goes on with w or newer <────────────────────────────  lag of what it takes: w - v

Actors call methods of the learner through a remote reference, or directly in one process. If an
actor's process dies, its unfinished unroll is lost; if its function raises, the training ends.
"""

from __future__ import annotations

import abc
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from braid.errors import CommTimeout, ConfigError, PeerLostError
from braid.rpc.rl.policies import Policy, Weights, weights_of

__all__ = ["Learner", "Statistics"]

NUM_EPISODES = 100  # of the mean return, as benchmarks of control count


class Statistics(NamedTuple):
    """Progress of a training, in numbers.

    Attributes:
        version: Updates of the weights.
        steps: Steps of environments that were learned from.
        episodes: Episodes that have ended.
        mean_return: Mean return of the last 100 episodes, NaN before the first.
        is_full: Whether at least 100 episodes have ended, so that the mean is over 100 of them.
        lags: Number of unrolls by lag: versions between the weights that played and the learner's.
        lost: Names of actors whose process was lost.
    """

    version: int
    steps: int
    episodes: int
    mean_return: float
    is_full: bool
    lags: dict[int, int]
    lost: tuple[str, ...]

    @property
    def mean_lag(self) -> float:
        """Mean lag of all unrolls, in versions."""
        return sum(lag * count for lag, count in self.lags.items()) / max(
            1, sum(self.lags.values())
        )


class Learner(abc.ABC):
    """Base class of learners: holds the weights that actors play with, and updates them.

    Args:
        module: Module of the policy, owned by this object.
        optimizer: Optimizer of its parameters.
        max_grad_norm: Bound of the norm of all gradients.
        serving: Policies of this process that get each new version.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        max_grad_norm: float = 0.5,
        serving: Iterable[Policy] = (),
    ) -> None:
        if not max_grad_norm > 0:
            msg = f"max_grad_norm must be positive, got {max_grad_norm}"
            raise ConfigError(msg)
        self.module = module
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._serving = tuple(serving)
        self._changed = threading.Condition()
        self._weights = weights_of(module, 0)
        self._is_over = False
        self._actors: set[str] = set()
        self._lost: list[str] = []
        self._missing: set[str] = set()
        self._error: BaseException | None = None
        self._steps = 0
        self._episodes = 0
        self._returns: deque[float] = deque(maxlen=NUM_EPISODES)
        self._lags: Counter[int] = Counter()

    # -- for actors

    def weights(self, version: int = -1) -> Weights | None:
        """Return the newest weights; None if training is over.

        If the caller already has the newest `version`, the result contains no tensors.
        """
        if self._is_over:
            return None
        newest = self._weights
        return newest if newest.version != version else Weights(version, {})

    # -- for the process that leads

    @abc.abstractmethod
    def step(self, timeout_s: float | None = None) -> None:
        """Wait for the next update of the weights, which needs experience of actors.

        Args:
            timeout_s: Seconds to wait for experience; unlimited when None.

        Raises:
            CommTimeout: No experience came in time.
            PeerLostError: No actor is left.
            Exception: The exception that an actor's function raised.
        """

    def join(self, actor: str) -> None:
        """Add an actor, whose experience `step` then waits for."""
        with self._changed:
            self._actors.add(actor)
            self._missing.discard(actor)

    def leave(self, actor: str, error: BaseException | None = None) -> None:
        """Remove an actor that has ended; `error` if its process is lost or its function raised."""
        with self._changed:
            self._actors.discard(actor)
            if isinstance(error, PeerLostError):
                self._lost.append(actor)
                self._missing.add(actor)
            elif error is not None and self._error is None:
                self._error = error
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether training was ended, by `stop` or by another learner of the group."""
        return self._is_over

    @property
    def missing(self) -> list[str]:
        """Actors that are lost, and that no new process has replaced."""
        with self._changed:
            return sorted(self._missing)

    def stop(self) -> None:
        """End training: actors get None instead of weights. Idempotent."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait_for_actors(self, timeout_s: float) -> list[str]:
        """Wait until all actors have ended; return the names of actors that still run."""
        with self._changed:
            self._changed.wait_for(lambda: not self._actors, timeout_s)
            return sorted(self._actors)

    @property
    def statistics(self) -> Statistics:
        """Progress of the training so far, such as its updates and steps."""
        with self._changed:
            returns = list(self._returns)
            return Statistics(
                version=self._weights.version,
                steps=self._steps,
                episodes=self._episodes,
                mean_return=sum(returns) / len(returns) if returns else float("nan"),
                is_full=len(returns) == NUM_EPISODES,
                lags=dict(sorted(self._lags.items())),
                lost=tuple(self._lost),
            )

    # -- for learners

    def _record(self, version: int, steps: int, returns: Iterable[float]) -> None:
        """Count experience of a version; under the lock."""
        ended = list(returns)
        self._lags[self._weights.version - version] += 1
        self._steps += steps
        self._episodes += len(ended)
        self._returns.extend(ended)

    def _update(self) -> None:
        """Step with the gradients of the module, and publish the weights."""
        nn.utils.clip_grad_norm_(self.module.parameters(), self._max_grad_norm)
        self._optimizer.step()
        self._weights = weights_of(self.module, self._weights.version + 1)
        for policy in self._serving:
            policy.load(self._weights)

    def _wait_for(self, is_there: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for experience under the lock; return whether training goes on."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        if self._error is not None and not self._is_over:  # though others may play on
            raise self._error
        while not is_there() and not self._is_over:
            self._check_actors()
            remaining_s = None if until is None else until - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                actors = ", ".join(sorted(self._actors))
                msg = (
                    f"no experience came within {timeout_s:g} s from {actors}: see their logs "
                    "for the first error"
                )
                raise CommTimeout(msg)
            self._changed.wait(remaining_s)
        return not self._is_over

    def _check_actors(self) -> None:
        """Raise if no actor can send experience; under the lock."""
        if self._error is not None:
            raise self._error
        if not self._actors and not self._is_over:
            lost = f"lost {', '.join(self._lost)}" if self._lost else "all have ended"
            msg = f"all actors were lost, at version {self._weights.version} of the weights: {lost}"
            raise PeerLostError(msg)
