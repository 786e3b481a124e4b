"""Unsharding of a model, to export it, or to use it on one rank or another mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from braid.comm import Group
from braid.parallel.gradients.incomplete import unmark_part
from braid.parallel.tensor_parallel.compared_calls import compare_no_more
from braid.parallel.tensor_parallel.slices import NotCopied, Slicing

__all__ = ["changes_of", "divide_states", "note_change", "slicing_of", "undivide"]

CHANGES = "braid_changes"  # attribute of a sharded model


class ModuleChange(NamedTuple):
    """Record of a changed attribute or class of a module, to undo the change."""

    module: nn.Module
    name: str
    before: Any


class Changes(NotCopied, list[ModuleChange]):
    """List of the changes of a sharded model; raises an error if the model is copied."""


def note_change(model: nn.Module, module: nn.Module, name: str) -> None:
    """Record the value of a module's attribute, before the attribute is changed."""
    changes_of(model).append(ModuleChange(module, name, getattr(module, name)))


def changes_of(model: nn.Module) -> Changes:
    """Return the list of changes of a model; the list marks the model as sharded."""
    changes: Changes = model.__dict__.setdefault(CHANGES, Changes())
    return changes


def slicing_of(param: torch.Tensor) -> Slicing | None:
    """Return the slicing of a parameter; None if it is not sharded."""
    slicing: Slicing | None = getattr(param, "braid_slicing", None)
    return slicing


@torch.no_grad()
def divide_states(
    optimizer: Optimizer, shapes: Mapping[torch.Tensor, torch.Size], group: Group
) -> None:
    """Replace an optimizer's whole states by this rank's shards.

    Args:
        optimizer: Optimizer of parameters that have been sharded since its creation.
        shapes: Shapes of the parameters before sharding.
        group: Ranks that share the model.
    """
    for param, state in optimizer.state.items():
        slicing = slicing_of(param)
        for name, value in state.items():
            if slicing is not None and getattr(value, "shape", None) == shapes.get(param):
                state[name] = slicing.part_of(value, group.rank, group.size)


@torch.no_grad()
def undivide(model: nn.Module, group: Group) -> None:
    """Restore the whole model on all ranks, in place; a collective.

    Gradients of sharded parameters are dropped, and states of optimizers stay sharded.

    Args:
        model: Model that `parallelize` has sharded.
        group: Ranks that share the model.

    Cost: one all_gather per sharded parameter.
    """
    compare_no_more(model)
    for param in model.parameters():
        slicing = slicing_of(param)
        if slicing is None:
            continue
        parts = group.all_gather(param.detach().reshape(1, -1).contiguous())
        param.grad = None
        param.data = slicing.whole_of([part.view(param.shape) for part in parts])
        del param.__dict__["braid_slicing"]
        unmark_part(param)
    model.__dict__.pop("forward", None)  # forward of a graph
    for change in reversed(model.__dict__.pop(CHANGES, [])):
        setattr(change.module, change.name, change.before)
