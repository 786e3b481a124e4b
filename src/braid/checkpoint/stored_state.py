"""Validates the values of optimizers and generators in a checkpoint's `state`.

A manifest's digest shows that it is unchanged, not that braid wrote it. For any content of `state`,
a program gets valid values or a `CheckpointError` with the name of the field.
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

__all__ = ["generator_states", "require_like", "stored_optimizer", "unloadable"]


class StoredOptimizer(msgspec.Struct, frozen=True):
    """Values of an optimizer that are not tensors.

    Attributes:
        type: Name of the optimizer's class; empty if no optimizer was saved.
        groups: Values of each parameter group, with the `names` of its parameters.
        numbers: State values of each parameter, by parameter name.
        rest: Other entries of `state_dict()`.
    """

    type: str = ""
    groups: list[dict[str, Any]] = []
    numbers: dict[str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}

    @property
    def names(self) -> list[Any]:
        """Names of the parameters of each group; `stored_optimizer` checks that they are text."""
        return [group.get("names", []) for group in self.groups]


def stored_optimizer(path: object, state: Mapping[str, Any]) -> StoredOptimizer:
    """Return the validated `optimizer` entry of the `state` of the checkpoint at `path`.

    Raises:
        CheckpointError: A field has the wrong type.
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
    """Return the state of each of `generators` in the `state` of the checkpoint at `path`.

    Raises:
        CheckpointError: A generator's state is missing or invalid.
    """
    kept = state.get("generators", {})
    if not isinstance(kept, dict):
        raise unloadable(path, "generators", f"Expected `object`, got {_shown(kept)}")
    states = {}
    for name, generator in generators.items():
        if name not in kept:
            msg = f"{path} has no state of the generator {name!r}; it has states of {sorted(kept)}"
            raise CheckpointError(msg)
        try:
            raw = bytearray(base64.b64decode(kept[name], validate=True))
            states[name] = torch.frombuffer(raw, dtype=torch.uint8)
            torch.Generator(generator.device).set_state(states[name])
        except (binascii.Error, TypeError, ValueError, RuntimeError) as exc:
            problem = f"it is not a state of a generator on {generator.device}: {exc}"
            raise unloadable(path, f"generators.{name}", problem) from exc
    return states


def require_like(path: object, field: str, stored: Any, current: Any) -> None:
    """Check that the stored value of `field` is a number if its current value is a number.

    Raises:
        CheckpointError: The stored value has another type.
    """
    numbers = (Real, torch.Tensor)
    if isinstance(current, numbers) and not (stored is None or isinstance(stored, numbers)):
        raise unloadable(path, field, f"Expected a number, got {_shown(stored)}")


def unloadable(path: object, field: str, problem: str) -> CheckpointError:
    """Return the error that a `field` in the state of the checkpoint at `path` has a `problem`."""
    return CheckpointError(
        f"state.{field} of {path} cannot be loaded: {problem}. Use another checkpoint of this "
        "run; this one was altered, or not written by braid"
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
