"""Environments: gymnasium's by name, and the part of their interface that actors need."""

from __future__ import annotations

from typing import Any, Protocol, SupportsFloat

from braid.errors import ConfigError

__all__ = ["Environment", "make_environment"]


class Environment(Protocol):
    """A world that an actor plays in, with the interface of gymnasium."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; return the first observation."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Act; return observation, reward, terminated, truncated and more information."""


def make_environment(name: str, **options: Any) -> Environment:
    """Return an environment of gymnasium.

    Args:
        name: Its name there, such as "CartPole-v1".
        options: Options of gymnasium.make.

    Raises:
        ConfigError: gymnasium is not installed, or has no environment of that name.
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
