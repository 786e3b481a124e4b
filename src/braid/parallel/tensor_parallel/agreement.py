"""Checks of a call of `parallelize`, of which all ranks must make the same.

Parts of different models fit together in shape, and training them shows nothing but bad results.
So ranks compare what they were given: parameters by name, shape and bits, plans, options and shapes
of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from braid.comm import Group
from braid.errors import ConfigError, raise_all
from braid.parallel.gradients import ParamTable
from braid.parallel.gradients.hashing import compare_values
from braid.parallel.tensor_parallel.whole import slicing_of
from braid.runtime.torch_internals import pytree

__all__ = ["check_call"]

SAME_START = (
    "give all ranks the same values before parallelize: torch.manual_seed with one number before "
    "the model is made, or one checkpoint"
)


def check_call(model: Any, group: Any, plan: Any, inputs: Any, options: Any) -> None:
    """Raise unless all ranks ask for the same division of the same model; a collective.

    Raises:
        ConfigError: An argument is of another type, or the model is divided already.
        MismatchError: Ranks have different models, plans, options or shapes of inputs; raised on
            every rank, with the differences.

    Cost: a pass over the parameters, and one all_gather of 8 bytes for each.
    """
    problems = []
    if not isinstance(model, nn.Module):
        problems.append(f"a model is a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(group, Group):
        problems.append(
            f'the ranks of a model are a group, such as braid.mesh("dp=2,tp=2")["tp"], got '
            f"{type(group).__name__}"
        )
    if plan is not None and not isinstance(plan, Mapping):
        problems.append(f"a plan maps expressions to kinds, got {type(plan).__name__}")
    if inputs is None and options != type(options)():
        problems.append(
            "sequence_parallel, strict and gather_outputs need inputs: a batch to capture"
        )
    raise_all(problems)
    if any(slicing_of(param) is not None for param in model.parameters()):
        msg = "the model is divided already: undivide(model, group) makes it whole again"
        raise ConfigError(msg)
    shapes = pytree.tree_map(_text, dict(inputs) if isinstance(inputs, Mapping) else inputs)
    table = ParamTable.of(model)
    table.compare(group, {"plan": plan, "inputs": shapes, "options": options})
    filled = [record for record in table if not record.param.is_meta]
    compare_values(group, filled, "when the model is divided", SAME_START)


def _text(leaf: object) -> object:
    """Return what ranks compare of an input."""
    if isinstance(leaf, torch.Tensor):
        return list(leaf.shape), str(leaf.dtype)
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf).__name__
