"""Lists, tuples, mappings and dataclasses: what they hold, and the same again with something else in it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, MutableMapping
from types import MappingProxyType
from typing import Any

__all__ = ["parts_of", "rebuilt"]


def parts_of(found: Any) -> dict[Any, Any] | None:
    """What a container holds, by key, position or field; None of anything else."""
    if isinstance(found, MutableMapping | MappingProxyType):
        return dict(found)
    if isinstance(found, list | tuple):
        return dict(enumerate(found))
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        names = [field.name for field in dataclasses.fields(found)]
        return {name: getattr(found, name) for name in names if hasattr(found, name)}
    return None


def rebuilt(found: Any, parts: dict[Any, Any]) -> Any:
    """A container like `found`, with `parts` under the keys that it has."""
    if isinstance(found, MappingProxyType):
        return MappingProxyType(parts)
    if isinstance(found, tuple):
        values: Iterable[Any] = parts.values()
        return type(found)(*values) if hasattr(found, "_fields") else type(found)(values)
    twin = copy.copy(found)  # keeps what else it has, such as the default of a defaultdict
    for key, value in parts.items():
        if isinstance(found, MutableMapping | list):
            twin[key] = value
        else:
            object.__setattr__(twin, key, value)  # also where it is frozen
    return twin
