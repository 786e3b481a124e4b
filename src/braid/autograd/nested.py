"""Tensors inside arguments: taken out of lists, tuples, dicts and dataclasses, and put back.

Containers that hold tensors are copied, so that later changes to them do not matter; whatever holds
none stays the same object. A tensor that occurs twice is one tensor afterwards, too: modules ask
whether `query is key`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["put_tensors", "take_tensors"]


class _Place(NamedTuple):
    """Where a tensor was."""

    number: int


def take_tensors(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """The tensors in `tree`, each once, and `tree` with places instead."""
    tensors: list[torch.Tensor] = []
    indices: dict[int, int] = {}

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        index = indices.setdefault(id(leaf), len(tensors))
        if index == len(tensors):
            tensors.append(leaf)
        return _Place(index)

    return _mapped(tree, take), tensors


def put_tensors(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """`tree` with tensors at their places again."""
    return _mapped(tree, lambda leaf: tensors[leaf.number] if isinstance(leaf, _Place) else leaf)


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return _changed(tree, {key: _mapped(value, change) for key, value in tree.items()})
    if isinstance(tree, list):
        return _changed(tree, {i: _mapped(value, change) for i, value in enumerate(tree)})
    if isinstance(tree, tuple) and not isinstance(tree, _Place):
        items = [_mapped(value, change) for value in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
        found = {name: _mapped(value, change) for name, value in fields.items()}
        if all(found[name] is fields[name] for name in fields):
            return tree
        twin = copy.copy(tree)
        for name, value in found.items():
            object.__setattr__(twin, name, value)  # also where it is frozen
        return twin
    return change(tree)


def _changed(container: Any, found: dict[Any, Any]) -> Any:
    """Return a copy of a dict or list, of its own type, with `found` in it."""
    if all(found[key] is container[key] for key in found):
        return container
    twin = copy.copy(container)
    for key, value in found.items():
        twin[key] = value
    return twin
