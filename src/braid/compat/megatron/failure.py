"""The exceptions of Megatron's functions, which are also braid's."""

from __future__ import annotations

from braid.errors import ConfigError, StaleError

__all__ = ["GroupNotInitializedError", "UnsupportedError", "UsageError"]


class UsageError(ConfigError, RuntimeError, AssertionError):
    """Error of an argument; in Megatron it is a RuntimeError or an AssertionError."""


class GroupNotInitializedError(StaleError, AssertionError):
    """Error if the groups of a kind were not created; an AssertionError as in Megatron."""


class UnsupportedError(UsageError, NotImplementedError):
    """Error for an unsupported option or name of Megatron; the message has an alternative."""
