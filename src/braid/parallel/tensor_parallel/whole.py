"""Makes a divided model whole again: to export it, or to use it on one rank or another mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.tensor_parallel.slices import Slicing

__all__ = ["ModuleChange", "changes_of", "divide_states", "note_change", "slicing_of", "undivide"]

CHANGES = "braid_changes"  # of a divided model


class ModuleChange(NamedTuple):
    """Change of a module besides its parameters: of an attribute, or of its class."""

    module: nn.Module
    name: str
    before: Any


class Changes(list[ModuleChange]):
    """Changes of a divided model."""

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse: torch would copy parameters without their slicing."""
        msg = (
            "a divided model cannot be copied: copy it before parallelize, or make it whole by "
            "undivide(model, group) first"
        )
        raise ConfigError(msg)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse: a pickled part does not know its group."""
        msg = (
            "a divided model cannot be pickled: save its state_dict(), or make it whole by "
            "undivide(model, group) first"
        )
        raise ConfigError(msg)


def note_change(model: nn.Module, module: nn.Module, name: str) -> None:
    """Note the value of an attribute before it is changed."""
    changes_of(model).append(ModuleChange(module, name, getattr(module, name)))


def changes_of(model: nn.Module) -> Changes:
    """Return the list of changes of a model, which marks it as divided."""
    changes: Changes = model.__dict__.setdefault(CHANGES, Changes())
    return changes


def slicing_of(param: torch.Tensor) -> Slicing | None:
    """Return how a parameter is divided; None if it is whole."""
    slicing: Slicing | None = getattr(param, "braid_slicing", None)
    return slicing


@torch.no_grad()
def divide_states(
    optimizer: Optimizer, shapes: Mapping[torch.Tensor, torch.Size], group: Group
) -> None:
    """Keep this rank's parts of an optimizer's states, in place, where they are whole.

    Args:
        optimizer: Optimizer of parameters that have been divided since.
        shapes: Shapes that the parameters had before.
        group: Ranks that share the model.
    """
    for param, state in optimizer.state.items():
        slicing = slicing_of(param)
        for name, value in state.items():
            if slicing is not None and getattr(value, "shape", None) == shapes.get(param):
                state[name] = slicing.part_of(value, group.rank, group.size)


@torch.no_grad()
def undivide(model: nn.Module, group: Group) -> None:
    """Give all ranks the whole model, in place; nothing is left of `parallelize`. A collective.

    Gradients of divided parameters are dropped, and states of optimizers stay divided.

    Args:
        model: Model that `parallelize` has divided.
        group: Ranks that share it.

    Cost: one all_gather of each divided parameter.
    """
    for param in model.parameters():
        slicing = slicing_of(param)
        if slicing is None:
            continue
        parts = group.all_gather(param.detach().reshape(1, -1).contiguous())
        param.grad = None
        param.data = slicing.whole_of([part.view(param.shape) for part in parts])
        del param.__dict__["braid_slicing"]
    model.__dict__.pop("forward", None)  # that of a graph
    for change in reversed(model.__dict__.pop(CHANGES, [])):
        setattr(change.module, change.name, change.before)
