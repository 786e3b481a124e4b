"""An actor plays several environments in step, and hands over unrolls of fixed length.

    t          0    1    2    3  |  0  ...
    env 0    x0a0 x1a1 x2a2 x3   | x3a0        an unroll goes on where the last one has ended
    env 1    x0a0 x1a1*x0a0 x1   | x1a0        * the episode ended: the next one begins

One forward pass chooses the actions of all environments. Each unroll is sent as one message: when
an actor dies, only its unfinished unroll is lost.

Environments have the interface of gymnasium, which `make_environment` makes by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, SupportsFloat

import numpy as np
import torch
from torch import Tensor

from braid.errors import ConfigError
from braid.rpc import register
from braid.rpc.rl.policies import Decision, Policy
from braid.rpc.rl.recurrence import reset

__all__ = ["Actor", "Environment", "Unroll", "make_environment"]


class Environment(Protocol):
    """Interface of an environment that an actor plays in, as in gymnasium."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; return the first observation."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take an action; return observation, reward, terminated, truncated and information."""


def make_environment(name: str, **options: Any) -> Environment:
    """Return an environment of gymnasium.

    Args:
        name: Its name there, such as "CartPole-v1".
        options: Options of gymnasium.make.

    Raises:
        ConfigError: gymnasium is not installed, or lacks an environment of that name.
    """
    try:
        import gymnasium  # noqa: PLC0415 - an extra
    except ImportError as exc:
        msg = f"the environment {name!r} needs gymnasium: pip install 'braid-train[rl]'"
        raise ConfigError(msg) from exc
    try:
        made: Environment = gymnasium.make(name, disable_env_checker=True, **options)
    except gymnasium.error.Error as exc:
        msg = f"gymnasium cannot make the environment {name!r}: {exc}"
        raise ConfigError(msg) from exc
    return made


@register
class Unroll(NamedTuple):
    """T consecutive steps of B environments, with the observations around them.

    Attributes:
        observations: Observations x_0 to x_T, [T + 1, B, ...].
        actions: Actions, [T, B], or [T, B, A] of a Gaussian.
        log_probs: Logarithms of the actions' probabilities when they were chosen, [T, B].
        rewards: Rewards, [T, B].
        terminated: Whether the episode has ended with the step, [T, B].
        truncated: Whether it was cut off after the step, [T, B].
        last_observations: Last observations of the K truncated episodes, [K, ...], in the order of
            the environments.
        returns: Sums of rewards of the episodes that ended here.
        version: Oldest version of the weights that chose actions.
        state: States of a recurrent policy before x_0, [B, ...]; None for other policies.
    """

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    last_observations: Tensor
    returns: tuple[float, ...]
    version: int
    state: Tensor | None = None

    @property
    def num_steps(self) -> int:
        """Number of steps of all environments."""
        return self.rewards.numel()


class Actor:
    """Plays environments with the actions of a policy, and returns unrolls.

    Args:
        environments: Environments, at least one; all have observations of one shape.
        policy: Policy that chooses the actions.
        unroll_length: Number of steps T in an unroll.
        seed: Seed of the first environment; the next environments have the seeds after it.

    Raises:
        ConfigError: There is no environment, or an unroll has no step.
    """

    def __init__(
        self,
        environments: Sequence[Environment],
        policy: Policy,
        *,
        unroll_length: int,
        seed: int,
    ) -> None:
        if not environments or unroll_length < 1:
            msg = (
                "an actor needs at least one environment and an unroll_length of at least 1 "
                f"step, got {len(environments)} environments and {unroll_length}"
            )
            raise ConfigError(msg)
        self.policy = policy
        self._environments = environments
        self._unroll_length = unroll_length
        first = [environment.reset(seed=seed + n)[0] for n, environment in enumerate(environments)]
        self._observations = _stack(first)
        self._returns = np.zeros(len(environments))
        shape = getattr(policy, "state_shape", None)
        self._state = None if shape is None else torch.zeros(len(environments), *shape)

    def unroll(self) -> Unroll:
        """Play the next steps of all environments."""
        size = (self._unroll_length, len(self._environments))
        observations, actions, log_probs = [self._observations], [], []
        rewards = np.zeros(size, np.float32)
        terminated, truncated = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        last: list[list[Any]] = [[] for _ in self._environments]
        returns: list[float] = []
        version, first_state = None, self._state
        for step in range(self._unroll_length):
            decision = self._decide()
            version = decision.version if version is None else min(version, decision.version)
            actions.append(decision.actions)
            log_probs.append(decision.log_probs)
            following = []
            for n, (environment, action) in enumerate(
                zip(self._environments, _by_environment(decision.actions), strict=True)
            ):
                observation, reward, ended, cut, _ = environment.step(action)
                rewards[step, n], terminated[step, n] = float(reward), ended
                self._returns[n] += float(reward)
                if ended or cut:
                    if not ended:
                        truncated[step, n] = True
                        last[n].append(observation)
                    returns.append(float(self._returns[n]))
                    self._returns[n] = 0.0
                    observation, _ = environment.reset()
                following.append(observation)
            self._observations = _stack(following)
            observations.append(self._observations)
            if decision.state is not None:
                ends = torch.from_numpy(terminated[step] | truncated[step])
                self._state = reset(decision.state, ends)
        cut_off = [observation for of_one in last for observation in of_one]
        return Unroll(
            torch.stack(observations),
            torch.stack(actions),
            torch.stack(log_probs),
            torch.from_numpy(rewards),
            torch.from_numpy(terminated),
            torch.from_numpy(truncated),
            _stack(cut_off) if cut_off else self._observations[:0],
            tuple(returns),
            version or 0,
            first_state,
        )

    def _decide(self) -> Decision:
        if self._state is None:
            return self.policy.decide(self._observations)
        return self.policy.decide(self._observations, self._state)


def _by_environment(actions: Tensor) -> list[Any]:
    """Return numbers for actions [B], and arrays of numpy for actions [B, A]."""
    return actions.tolist() if actions.dim() == 1 else list(actions.numpy())


def _stack(observations: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.stack(observations)).to(torch.get_default_dtype())
