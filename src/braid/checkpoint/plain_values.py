"""Nested values as JSON and tensors, and back, for what optimizers keep besides tensors.

JSON knows no tensors, tuples or infinities, and would return them as something else or not at all.
So each stands behind a tag:

    {"start": [x], "step": 3, "betas": (0.9, 0.99)}

    {"dict": {"start": [{"tensor": "NAME/start/0"}], "step": 3, "betas": {"tuple": [0.9, 0.99]}}}
    and x under NAME/start/0

Dicts with other keys than text, and counters (of MultiStepLR), are lists of pairs behind a tag.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch

from braid.errors import CheckpointError, ConfigError

__all__ = ["from_plain", "to_plain"]


def to_plain(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON; its tensors are added to `tensors`, under names in `name`.

    Raises:
        ConfigError: The value holds something that cannot be stored.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # not what a class derived from it prints, such as an Enum
    if isinstance(value, Integral):  # also numpy's
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, torch.Tensor) and name not in tensors:
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, list | tuple):
        items = [to_plain(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {k: to_plain(x, f"{name}/{k}", tensors) for k, x in value.items()}}
    if isinstance(value, dict):
        pairs = [
            [to_plain(key, f"{name} (key)", tensors), to_plain(x, f"{name}/{key}", tensors)]
            for key, x in value.items()
        ]
        return {"counter" if isinstance(value, Counter) else "pairs": pairs}
    kind = type(value).__name__
    kind = "a second tensor of this name" if isinstance(value, torch.Tensor) else kind
    msg = (
        f"a state has {kind} as {name!r}, which a checkpoint cannot hold: let "
        "state_dict() return tensors, numbers, text, lists, tuples and dicts, or leave it out "
        "there"
    )
    raise ConfigError(msg)


def from_plain(value: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """Return the value of which `to_plain` made this JSON.

    Args:
        value: Value out of JSON.
        read: Function that returns the tensor of a name.

    Raises:
        CheckpointError: `to_plain` does not make such JSON.
    """
    if isinstance(value, list):
        return [from_plain(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("tensor", str(name))]:
            return read(name)
        case [("float", "inf" | "-inf" | "nan" as text)]:
            return float(text)
        case [("tuple", list(items))]:
            return tuple(from_plain(item, read) for item in items)
        case [("dict", dict(items))]:
            return {key: from_plain(item, read) for key, item in items.items()}
        case [("pairs" | "counter" as kind, list(items))]:
            with contextlib.suppress(TypeError, ValueError):  # no pairs, or no keys
                pairs = {from_plain(key, read): from_plain(item, read) for key, item in items}
                return Counter(pairs) if kind == "counter" else pairs
    msg = (
        f"optimizer's state in the checkpoint has {str(value)[:80]!r}, which is no tensor, "
        "float, tuple, dict or counter"
    )
    raise CheckpointError(msg)
