"""Check of the arguments that every collective with gradients takes: a group, then a tensor.

In torch the tensor is the first argument and the group the last. Here the group comes first. If a
call swaps them, the error asks to swap them back, rather than reporting a missing attribute.
"""

from __future__ import annotations

import numpy as np
import torch

from braid.comm import Group
from braid.errors import ConfigError

__all__ = ["check_call"]


def check_call(
    operation: str, group: Group, x: torch.Tensor, dim: int = 0, *, name: str = "x"
) -> None:
    """Raise if the arguments are not a group, a tensor and one of its dims.

    Args:
        operation: Name of the function, for the message.
        group: Value that was passed as group.
        x: Value that was passed as tensor.
        dim: Dim of the concatenation or split; 0 is allowed for a zero-dim tensor.
        name: Name of the parameter `x`.

    Raises:
        ConfigError: An argument has another type; the message contains the correct call.
    """
    signature = f"{operation}(group, {name}, ...) with a braid.Group and a torch.Tensor"
    if not isinstance(group, Group):
        # for callers without a type checker
        kinds = f"{type(group).__name__} and {type(x).__name__}"  # type: ignore[unreachable]
        advice = (
            f"swap them, the group comes first: {operation}(group, {name})"
            if isinstance(x, Group)
            else "pass a group, such as the result of braid.init() or group.split(...)"
        )
        msg = f"call {signature}, got {kinds}: {advice}"
        raise ConfigError(msg)
    if not isinstance(x, torch.Tensor):
        msg = f"call {signature}, got {_described(x)} as {name}: {_advice(x)}"  # type: ignore[unreachable]
        raise ConfigError(msg)
    if not hasattr(dim, "__index__") or not -max(x.dim(), 1) <= dim < max(x.dim(), 1):
        msg = (
            f"{operation} got dim {dim!r}, but {name} has the shape {list(x.shape)}: pass a dim of "
            f"{name}"
        )
        raise ConfigError(msg)


def _described(x: object) -> str:
    inner = f" of {type(x[0]).__name__}" if isinstance(x, list | tuple) and x else ""
    return f"{type(x).__name__}{inner}"


def _advice(x: object) -> str:
    if isinstance(x, list | tuple) and any(isinstance(part, torch.Tensor) for part in x):
        return "pass torch.cat(...) of the parts, and their lengths as sizes if they differ"
    if isinstance(x, np.ndarray):
        return (
            "pass torch.from_numpy(...) of it; without gradients, the methods of the group "
            "accept arrays"
        )
    if isinstance(x, list | tuple | int | float | complex):
        return "pass torch.tensor(...) of it"
    return "pass a tensor"
