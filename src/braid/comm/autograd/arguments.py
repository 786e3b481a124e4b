"""Arguments that every collective with gradients takes: a group, then a tensor.

In torch the tensor comes first and the group last, if at all. Here the group comes first. A call
with the two swapped is refused with this advice, instead of which attribute a tensor lacks.
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
    """Refuse arguments that are not a group, a tensor and one of its dims.

    Args:
        operation: Name of the function, for the message.
        group: Value that was passed as group.
        x: Value that was passed as tensor.
        dim: Dim along which the tensor's parts lie; 0 is fine for a zero-dim one.
        name: Name of the parameter `x`.

    Raises:
        ConfigError: An argument is something else; the message says what to pass.
    """
    signature = f"{operation}(group, {name}, ...) with a braid.Group and a torch.Tensor"
    if not isinstance(group, Group):
        # for callers without a type checker
        kinds = f"{type(group).__name__} and {type(x).__name__}"  # type: ignore[unreachable]
        advice = (
            f"swap them, the group comes first: {operation}(group, {name})"
            if isinstance(x, Group)
            else "pass the group itself, such as braid.init() or group.split(...) returns it"
        )
        msg = f"call {signature}, got {kinds}: {advice}"
        raise ConfigError(msg)
    if not isinstance(x, torch.Tensor):
        msg = f"call {signature}, got {_described(x)} as {name}: {_advice(x)}"  # type: ignore[unreachable]
        raise ConfigError(msg)
    if not hasattr(dim, "__index__") or not -max(x.dim(), 1) <= dim < max(x.dim(), 1):
        msg = f"{operation} got dim {dim!r}, which {name} of shape {list(x.shape)} does not have"
        raise ConfigError(msg)


def _described(x: object) -> str:
    inner = f" of {type(x[0]).__name__}" if isinstance(x, list | tuple) and x else ""
    return f"{type(x).__name__}{inner}"


def _advice(x: object) -> str:
    if isinstance(x, list | tuple) and any(isinstance(part, torch.Tensor) for part in x):
        return "pass torch.cat(...) of the parts, with their lengths as sizes where these differ"
    if isinstance(x, np.ndarray):
        return (
            "pass torch.from_numpy(...) of it; use the group's own functions for arrays "
            "without gradients"
        )
    if isinstance(x, list | tuple | int | float | complex):
        return "pass torch.tensor(...) of it"
    return "pass a tensor"
