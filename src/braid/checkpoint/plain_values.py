"""Conversion of nested optimizer values to JSON and tensors, and back.

JSON has no tensors, tuples or infinities. So each of these values is stored under a tag:

    {"start": [x], "step": 3, "betas": (0.9, 0.99)}

    {"dict": {"start": [{"tensor": "NAME/start/0"}], "step": 3, "betas": {"tuple": [0.9, 0.99]}}}
    and x is stored under NAME/start/0

Dicts with keys that are not text, and counters (in MultiStepLR), are tagged lists of pairs.
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
    """Convert a value to JSON; add its tensors to `tensors`, under names that begin with `name`.

    Raises:
        ConfigError: The value contains an object that cannot be stored.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # plain text, also for a subclass such as an Enum
    if isinstance(value, Integral):  # includes numpy's integers
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
        f"a state has {kind} as {name!r}, which a checkpoint cannot store: return "
        "tensors, numbers, text, lists, tuples and dicts from state_dict(), or leave this value "
        "out"
    )
    raise ConfigError(msg)


def from_plain(value: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """Convert JSON from `to_plain` back to the original value.

    Args:
        value: JSON value.
        read: Function that returns the tensor with a name.

    Raises:
        CheckpointError: The JSON is not in the format of `to_plain`.
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
            with contextlib.suppress(TypeError, ValueError):  # invalid pairs or keys
                pairs = {from_plain(key, read): from_plain(item, read) for key, item in items}
                return Counter(pairs) if kind == "counter" else pairs
    msg = (
        f"optimizer's state in the checkpoint has {str(value)[:80]!r}, which is not a "
        "tensor, float, tuple, dict or counter"
    )
    raise CheckpointError(msg)
