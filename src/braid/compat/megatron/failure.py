"""The exceptions of Megatron's functions, which are also braid's."""

from __future__ import annotations

from braid.errors import ConfigError, StaleError

__all__ = ["GroupNotInitializedError", "UnsupportedError", "UsageError"]


class UsageError(ConfigError, RuntimeError, AssertionError):
    """An argument cannot work; Megatron raises a RuntimeError or AssertionError, by the place."""


class GroupNotInitializedError(StaleError, AssertionError):
    """There are no groups of a kind, or this rank is in none; Megatron's is an AssertionError."""


class UnsupportedError(UsageError, NotImplementedError):
    """An option or name of Megatron that braid does not have; the message has what to do."""
