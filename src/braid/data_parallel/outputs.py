"""Tensors in what a module takes and returns, however it is nested."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from braid.data_parallel.containers import parts_of, rebuilt

__all__ = ["mapped", "tensors_in"]


def tensors_in(found: Any) -> Iterator[torch.Tensor]:
    """All tensors in lists, tuples, mappings and dataclasses, however nested."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from tensors_in(value)
    elif isinstance(found, list | tuple | set | frozenset):
        for value in found:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(found) and not isinstance(found, type):
        for field in dataclasses.fields(found):
            yield from tensors_in(getattr(found, field.name))


def mapped(found: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with every tensor in lists, tuples, mappings and dataclasses changed.

    A tensor that occurs twice is one afterwards, too: modules ask whether `query is key`. Containers in which nothing changes stay the
    same objects, others are copied. Mappings that cannot be assigned to stay as they are, unless they are a `MappingProxyType`.
    """
    made: dict[int, torch.Tensor] = {}

    def once(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in made:
            made[id(x)] = change(x)
        return made[id(x)]

    return _mapped(found, once)


def _mapped(found: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(found, torch.Tensor):
        return change(found)
    parts = parts_of(found) or {}
    new = {key: _mapped(value, change) for key, value in parts.items()}
    return found if all(new[key] is parts[key] for key in parts) else rebuilt(found, new)
