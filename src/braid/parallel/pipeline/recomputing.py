"""Whether a layer's forward runs without saving anything, or once more to recompute.

Layers with effects of their own, such as running statistics, ask, so that these happen once.
"""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["CHECKPOINTING", "RECOMPUTING", "is_checkpointing", "is_recomputing"]

CHECKPOINTING: ContextVar[bool] = ContextVar("braid_checkpointing", default=False)
RECOMPUTING: ContextVar[bool] = ContextVar("braid_recomputing", default=False)


def is_checkpointing() -> bool:
    """Return whether the forward that is running will be recomputed in backward."""
    return CHECKPOINTING.get()


def is_recomputing() -> bool:
    """Return whether the forward that is running recomputes an earlier one."""
    return RECOMPUTING.get()
