"""Weights of losses, as programs pass them."""

from __future__ import annotations

from braid.errors import ConfigError

__all__ = ["checked_weight"]


def checked_weight(weight: object) -> float:
    """Return a loss weight, a number or a tensor of one element, as a float.

    Raises:
        ConfigError: The weight is negative, not finite, or not a number.
    """
    try:
        # the program may pass anything
        number = -1.0 if isinstance(weight, str) else float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        number = -1.0
    if not 0 <= number < float("inf"):
        msg = f"a loss weight must be finite and not negative, got {weight!r}"
        raise ConfigError(msg)
    return number
