"""`megatron.core.utils`: division without remainder, and size and rank of a group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from braid.comm import Group
from braid.compat.megatron.failure import UsageError
from braid.compat.megatron.groups import braid_group
from braid.compat.megatron.parallel_state import (
    get_expert_tensor_parallel_group,
    get_tensor_model_parallel_group,
)

__all__ = [
    "divide",
    "ensure_divisibility",
    "get_pg_rank",
    "get_pg_size",
    "get_tensor_model_parallel_group_if_none",
    "part_size",
    "tensor_group",
]


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise UsageError (an AssertionError) if a division has a remainder."""
    if numerator % denominator:
        msg = (
            f"{numerator} is not divisible by {denominator}: choose a multiple of {denominator}, "
            "or other parallel sizes"
        )
        raise UsageError(msg)


def divide(numerator: int, denominator: int) -> int:
    """Return an exact quotient; raise if there is a remainder, see `ensure_divisibility`."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def part_size(name: str, length: int, size: int) -> int:
    """Return the length of one rank's part of `length`; `name` is for the error.

    Raises:
        UsageError: The length is not divisible by the number of ranks.
    """
    if length % size:
        msg = (
            f"{name} {length} is not divisible by {size} tensor parallel ranks: choose a multiple "
            f"of {size}, or another tensor_model_parallel_size"
        )
        raise UsageError(msg)
    return length // size


def get_tensor_model_parallel_group_if_none(
    tp_group: Any, is_expert: bool = False, check_initialized: bool = True
) -> Any:
    """Return `tp_group`, or the tensor parallel group when None.

    Args:
        tp_group: Process group of the tensor parallel ranks.
        is_expert: Whether to use the group of experts when `tp_group` is None.
        check_initialized: Whether to raise an error if no such group exists; else return None.
    """
    if tp_group is not None:
        return tp_group
    if is_expert:
        return get_expert_tensor_parallel_group(check_initialized=check_initialized)
    return get_tensor_model_parallel_group(check_initialized=check_initialized)


def get_pg_size(group: Any = None) -> int:
    """Return the number of ranks of a group; 1 without torch.distributed or group."""
    return 1 if group is None or not dist.is_initialized() else int(group.size())


def get_pg_rank(group: Any = None) -> int:
    """Return the rank in a group; 0 without torch.distributed or group."""
    return 0 if group is None or not dist.is_initialized() else int(group.rank())


def tensor_group(tp_group: Any = None, *, is_expert: bool = False) -> Group:
    """Return braid's group for `tp_group`, or for the tensor parallel group when None.

    Args:
        tp_group: Process group of the tensor parallel ranks.
        is_expert: Whether to use the group of experts when `tp_group` is None.
    """
    return braid_group(get_tensor_model_parallel_group_if_none(tp_group, is_expert))
