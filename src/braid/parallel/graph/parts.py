"""Parts of a model as modules: some of its modules and tensors, under their names in the model.

Empty modules replace their owners. So the `state_dict` of a part is a subset of the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from braid.runtime.torch_internals import (
    own_buffers,
    own_modules,
    own_parameters,
    transient_buffers,
)

__all__ = ["Owner", "add_module", "add_tensor", "owner_at", "part_of"]


class Owner(nn.Module):
    """Empty module at the place of a module of the model, to hold only some of its children."""

    def __getitem__(self, name: int | str) -> Any:
        """Return a module or tensor by its name, or by its index in a list."""
        for table in (self._modules, self._parameters, self._buffers):
            if str(name) in table:
                return table[str(name)]
        raise KeyError(name)


def part_of(model: nn.Module, modules: Iterable[str], tensors: Iterable[str] = ()) -> nn.Module:
    """Return a part of a model as a module.

    Args:
        model: The model.
        modules: Names of its modules.
        tensors: Names of its parameters, buffers and other attributes that are tensors.

    Returns:
        A module with these modules and tensors under their names; the model itself if `modules`
        contains "".
    """
    part = Owner()
    part.training = model.training
    for name in modules:
        if not name:
            return model
        add_module(part, name, model.get_submodule(name))
    for name in tensors:
        *path, leaf = name.split(".")
        owner = model.get_submodule(".".join(path))
        is_transient = leaf in transient_buffers(owner)
        if leaf in own_buffers(owner) or leaf in own_parameters(owner):
            add_tensor(part, name, attrgetter(leaf)(owner), is_transient=is_transient)
        else:
            vars(owner_at(part, path))[leaf] = vars(owner)[leaf]
    return part


def add_module(part: nn.Module, name: str, module: nn.Module) -> None:
    """Add a module of the model to the stage `part`, under its name in the model."""
    *path, leaf = name.split(".")
    own_modules(owner_at(part, path))[leaf] = module


def add_tensor(part: nn.Module, name: str, tensor: torch.Tensor, *, is_transient: bool) -> None:
    """Add a parameter or buffer of the model to the stage `part`, under its name in the model.

    If `is_transient`, the stage's `state_dict` leaves out the buffer.
    """
    *path, leaf = name.split(".")
    owner = owner_at(part, path)
    if isinstance(tensor, nn.Parameter):
        own_parameters(owner)[leaf] = tensor
        return
    own_buffers(owner)[leaf] = tensor
    if is_transient:
        transient_buffers(owner).add(leaf)


def owner_at(part: nn.Module, path: Sequence[str]) -> nn.Module:
    """Return the module at a path of names; create empty modules for missing names."""
    module = part
    for name in path:
        inner = own_modules(module).get(name)
        if inner is None:
            inner = own_modules(module)[name] = Owner()
        module = inner
    return module
