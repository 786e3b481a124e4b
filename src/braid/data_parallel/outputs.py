"""Tensors in what a module takes and returns, however it is nested."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

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
    """The same structure with every tensor in lists, tuples, dicts and dataclasses changed."""
    if isinstance(found, torch.Tensor):
        return change(found)
    if isinstance(found, dict):
        return type(found)((key, mapped(value, change)) for key, value in found.items())
    if isinstance(found, tuple) and hasattr(found, "_fields"):
        return type(found)(*(mapped(value, change) for value in found))
    if isinstance(found, list | tuple):
        return type(found)(mapped(value, change) for value in found)
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        changed = {
            f.name: mapped(getattr(found, f.name), change)
            for f in dataclasses.fields(found)
            if f.init
        }
        return dataclasses.replace(found, **changed)
    return found
