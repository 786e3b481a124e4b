"""State of the running forward: whether it saves nothing, or recomputes an earlier one.

Layers with side effects, such as running statistics, read it to apply them once.
"""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["CHECKPOINTING", "RECOMPUTING", "is_checkpointing", "is_recomputing"]

CHECKPOINTING: ContextVar[bool] = ContextVar("braid_checkpointing", default=False)
RECOMPUTING: ContextVar[bool] = ContextVar("braid_recomputing", default=False)


def is_checkpointing() -> bool:
    """Return whether the running forward will be recomputed in backward."""
    return CHECKPOINTING.get()


def is_recomputing() -> bool:
    """Return whether the running forward recomputes an earlier one."""
    return RECOMPUTING.get()
