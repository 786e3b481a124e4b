"""What every collective with gradients is called with: a group, then a tensor.

In torch the tensor comes first and the group last, if at all; here a group is what one speaks to,
so it comes first. Whoever has it the other way round is told so, instead of which attribute a
tensor lacks.
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
    """Refuse what is not a group, a tensor and one of its dims.

    Args:
        operation: Name of the function, for the message.
        group: What was passed as group.
        x: What was passed as tensor.
        dim: Along which its parts lie; 0 is fine for a zero-dim one.
        name: Of the parameter `x`.

    Raises:
        ConfigError: Something else; says what to pass.
    """
    wanted = f"{operation}(group, {name}, ...) with a braid.Group and a torch.Tensor"
    if not isinstance(group, Group):
        found = f"{type(group).__name__} and {type(x).__name__}"  # type: ignore[unreachable]  # unchecked callers
        advice = (
            f"swap them, the group comes first: {operation}(group, {name})"
            if isinstance(x, Group)
            else "pass the group itself, such as braid.init() or group.split(...) returns it"
        )
        msg = f"expected {wanted}, found {found}: {advice}"
        raise ConfigError(msg)
    if not isinstance(x, torch.Tensor):
        msg = f"expected {wanted}, found {_described(x)} as {name}: {_advice(x)}"  # type: ignore[unreachable]  # likewise
        raise ConfigError(msg)
    if not hasattr(dim, "__index__") or not -max(x.dim(), 1) <= dim < max(x.dim(), 1):
        msg = (
            f"expected a dim of {name}, whose shape is {list(x.shape)}, found {dim!r} for "
            f"{operation}"
        )
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
