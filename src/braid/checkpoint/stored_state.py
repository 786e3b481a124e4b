"""Checks the values of a checkpoint's `state` that were made of an optimizer and of generators.

A manifest's digest shows that it is unchanged, not that braid wrote it. Whatever stands in its
`state`, a program gets the values or a `CheckpointError` with the name of the field.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from numbers import Real
from typing import Any

import msgspec
import torch

from braid.errors import CheckpointError

__all__ = [
    "StoredOptimizer",
    "generator_states",
    "require_like",
    "stored_optimizer",
    "unloadable",
]


class StoredOptimizer(msgspec.Struct, frozen=True):
    """Values of an optimizer that are no tensors.

    Attributes:
        type: Name of the optimizer's class; empty if no optimizer was saved.
        groups: Values of each parameter group, with the `names` of its parameters.
        numbers: Values of the state of each parameter, by its name.
        rest: Further entries of `state_dict()`.
    """

    type: str = ""
    groups: list[dict[str, Any]] = []
    numbers: dict[str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}

    @property
    def names(self) -> list[Any]:
        """Names of the parameters of each group; a list of text after `stored_optimizer`."""
        return [group.get("names", []) for group in self.groups]


def stored_optimizer(path: object, state: Mapping[str, Any]) -> StoredOptimizer:
    """Return the `optimizer` of a checkpoint's `state`.

    Raises:
        CheckpointError: A field has a type that it cannot have.
    """
    try:
        stored = msgspec.convert(state.get("optimizer", {}), StoredOptimizer)
    except msgspec.ValidationError as exc:
        problem, _, field = str(exc).partition(" - at `$")
        raise unloadable(path, f"optimizer{field.rstrip('`')}", problem) from exc
    for index, names in enumerate(stored.names):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise unloadable(path, f"optimizer.groups[{index}].names", "Expected a list of text")
    return stored


def generator_states(
    path: object, state: Mapping[str, Any], generators: Mapping[str, torch.Generator]
) -> dict[str, torch.Tensor]:
    """Return the state of each of `generators` in a checkpoint's `state`.

    Raises:
        CheckpointError: There is none for one of them, or it is no state of such a generator.
    """
    kept = state.get("generators", {})
    if not isinstance(kept, dict):
        raise unloadable(path, "generators", f"Expected `object`, got {_shown(kept)}")
    states = {}
    for name, generator in generators.items():
        if name not in kept:
            msg = f"{path} has no state of generator {name!r}, but of {sorted(kept)}"
            raise CheckpointError(msg)
        try:
            raw = bytearray(base64.b64decode(kept[name], validate=True))
            states[name] = torch.frombuffer(raw, dtype=torch.uint8)
            torch.Generator(generator.device).set_state(states[name])
        except (binascii.Error, TypeError, ValueError, RuntimeError) as exc:
            problem = f"it is no state of a generator on {generator.device}: {exc}"
            raise unloadable(path, f"generators.{name}", problem) from exc
    return states


def require_like(path: object, field: str, stored: Any, current: Any) -> None:
    """Check that a stored value is a number if the present one is.

    Raises:
        CheckpointError: It is something else.
    """
    numbers = (Real, torch.Tensor)
    if isinstance(current, numbers) and not (stored is None or isinstance(stored, numbers)):
        raise unloadable(path, field, f"Expected a number, got {_shown(stored)}")


def unloadable(path: object, field: str, problem: str) -> CheckpointError:
    """Return the error for a field of `state` that cannot be loaded."""
    return CheckpointError(
        f"state.{field} of {path} cannot be loaded: {problem}. Use another checkpoint of this "
        "run; this one was altered, or not written by braid"
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
