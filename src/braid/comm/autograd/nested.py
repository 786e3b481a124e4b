"""Tensors in nested containers: find, map, extract and reinsert them.

Lists, tuples, named tuples, mappings and dataclasses are traversed, including subclasses.
Containers without a change stay the same objects; others are copied with their other attributes,
such as the default of a `defaultdict`. A tensor that occurs twice is still one tensor afterwards:
modules test `query is key`.

Why not `torch.utils._pytree`: it matches exact types, so a dataclass, a `UserDict` or a subclass
of `dict` (a model's output in `transformers`) is a leaf unless it is registered for the whole
process. It also drops other attributes of a container, and copies containers that do not change.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

__all__ = [
    "TensorPlace",
    "flatten",
    "index_of",
    "map_tensors",
    "parts_of",
    "rebuild",
    "tensors_in",
    "unflatten",
]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPlace:
    """Placeholder of a tensor that `flatten` extracted; a leaf of the tree."""

    index: int


def flatten(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return `tree` with placeholders instead of tensors, and the tensors, each once."""
    if type(tree) is torch.Tensor:
        return TensorPlace(0), [tree]
    tensors: list[torch.Tensor] = []
    indices: dict[int, int] = {}

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        index = indices.setdefault(id(leaf), len(tensors))
        if index == len(tensors):
            tensors.append(leaf)
        return TensorPlace(index)

    return _map_leaves(tree, replace), tensors


def unflatten(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return a `tree` of `flatten` with `tensors` instead of its placeholders."""
    if type(tree) is TensorPlace:
        return tensors[tree.index]
    return _map_leaves(tree, lambda x: tensors[x.index] if isinstance(x, TensorPlace) else x)


def index_of(leaf: Any) -> int | None:
    """Return the index of a placeholder from `flatten`; None for anything else."""
    return leaf.index if isinstance(leaf, TensorPlace) else None


def map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `tree` with every tensor x replaced by `change(x)`.

    Immutable mappings other than `MappingProxyType` stay as they are.
    """
    if type(tree) is torch.Tensor:
        return change(tree)
    changed: dict[int, torch.Tensor] = {}

    def change_once(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in changed:
            changed[id(leaf)] = change(leaf)
        return changed[id(leaf)]

    return _map_leaves(tree, change_once)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in `tree`, including sets and immutable mappings."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, set | frozenset):
        for item in tree:
            yield from tensors_in(item)
    else:
        parts = dict(tree) if isinstance(tree, Mapping) else parts_of(tree) or {}
        for item in parts.values():
            yield from tensors_in(item)


def parts_of(container: Any) -> dict[Any, Any] | None:
    """Return the items of a container by key, position or field; None for anything else."""
    if isinstance(container, MutableMapping | MappingProxyType):
        return dict(container)
    if isinstance(container, list | tuple):
        return dict(enumerate(container))
    if isinstance(container, TensorPlace | type):
        return None
    if dataclasses.is_dataclass(container):
        names = [field.name for field in dataclasses.fields(container)]
        return {name: getattr(container, name) for name in names if hasattr(container, name)}
    return None


def rebuild(container: Any, parts: dict[Any, Any]) -> Any:
    """Return a copy of `container` with other items: `parts`, keyed as `parts_of` returns."""
    if isinstance(container, MappingProxyType):
        return MappingProxyType(parts)
    if isinstance(container, tuple):
        values = list(parts.values())
        return (
            type(container)(*values) if hasattr(container, "_fields") else type(container)(values)
        )
    changed = copy.copy(container)
    for key, value in parts.items():
        if isinstance(container, MutableMapping | list):
            changed[key] = value
        else:
            object.__setattr__(changed, key, value)  # works for frozen dataclasses
    return changed


def _map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    parts = parts_of(tree)
    if parts is None:
        return change(tree)
    new = {key: _map_leaves(value, change) for key, value in parts.items()}
    return tree if all(new[key] is parts[key] for key in parts) else rebuild(tree, new)
