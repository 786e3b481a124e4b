"""State of the running forward: whether it saves nothing, or recomputes an earlier one.

Layers with side effects, such as running statistics, read it to apply them once.
"""

from __future__ import annotations

from contextvars import ContextVar

from braid.comm.autograd.recompute_policy import RecomputePolicy, check_policy
from braid.errors import ConfigError

__all__ = [
    "CHECKPOINTING",
    "RECOMPUTING",
    "check_recompute_policy",
    "is_checkpointing",
    "is_recomputing",
]

CHECKPOINTING: ContextVar[bool] = ContextVar("braid_checkpointing", default=False)
RECOMPUTING: ContextVar[bool] = ContextVar("braid_recomputing", default=False)


def is_checkpointing() -> bool:
    """Return whether the running forward will be recomputed in backward."""
    return CHECKPOINTING.get()


def is_recomputing() -> bool:
    """Return whether the running forward recomputes an earlier one."""
    return RECOMPUTING.get()


def check_recompute_policy(policy: RecomputePolicy | None, recompute: str | int) -> None:
    """Check a pipeline's policy of recomputation.

    Raises:
        ConfigError: The policy is not one, or nothing is recomputed.
    """
    if policy is None:
        return
    check_policy(policy)
    if recompute == "never":
        msg = (
            'recompute_policy has no effect with recompute="never": pass recompute="always", '
            '"except_last" or a number of layers'
        )
        raise ConfigError(msg)
