"""`megatron.core.utils`: exact division, ranks of groups, attributes of wrapped models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from braid.comm import Group
from braid.compat.megatron.failure import UsageError
from braid.compat.megatron.groups import braid_group
from braid.compat.megatron.parallel_state import (
    get_expert_tensor_parallel_group,
    get_tensor_model_parallel_group,
)

__all__ = [
    "current_device",
    "divide",
    "ensure_divisibility",
    "get_attr_wrapped_model",
    "get_model_config",
    "get_pg_rank",
    "get_pg_size",
    "get_tensor_model_parallel_group_if_none",
    "part_size",
    "tensor_group",
    "timed",
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


def get_attr_wrapped_model(
    model: Any, attr: str, allow_none: bool = True, return_model_obj: bool = False
) -> Any:
    """Return an attribute of a model, or of the module that the model wraps.

    Args:
        model: Model, whose `module` is a wrapped model, if there is one.
        attr: Name of the attribute.
        allow_none: Whether None counts as a value.
        return_model_obj: Whether to return the module that has the attribute.

    Raises:
        UsageError: No module has the attribute.
    """
    module = model
    while not hasattr(module, attr) or not (allow_none or getattr(module, attr) is not None):
        if not hasattr(module, "module"):
            msg = (
                f"_get_attr_wrapped_model couldn't find attribute {attr}: define it in "
                f"{type(module).__name__}"
            )
            raise UsageError(msg)
        module = module.module
    return module if return_model_obj else getattr(module, attr)


def get_model_config(model: Any) -> Any:
    """Return the attribute `config` of a model or of the module that it wraps."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def current_device() -> torch.device:
    """Return the current GPU; the CPU if there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def timed(config: Any, name: str, log_level: int = 2) -> Iterator[None]:
    """Start the timer `name` of `config.timers`, if there are timers; stop it after the block.

    The timer also stops if the block raises, so that a program can start it again.
    """
    timers = getattr(config, "timers", None)
    if timers is None:
        yield
        return
    options = {"barrier": config.barrier_with_L1_time} if log_level == 1 else {}
    timers(name, log_level=log_level).start(**options)
    try:
        yield
    finally:
        timers(name).stop()
