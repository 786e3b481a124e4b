"""`divide_experts`: shards the experts of a whole model over ranks, in place.

Models of transformers (Mixtral, Qwen2-MoE, Qwen3-MoE and others) keep the experts of a layer in one
module with parameters of three dims, (expert, ...), and call it with tokens and choices:

    experts(hidden_states, top_k_index, top_k_weights)

Layers of `MixtureOfExperts` with a group of one rank are sharded as well.

Each rank keeps some experts of these parameters. The module's own forward then runs them on the
tokens received from all ranks, with one choice of weight 1 per token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from braid.comm import Group
from braid.errors import raise_all
from braid.parallel.expert_parallel.dispatch import Dispatch
from braid.parallel.expert_parallel.mixture import MixtureOfExperts, check_experts, mark_experts
from braid.parallel.gradients.incomplete import unmark_part
from braid.parallel.gradients.state_parts import note_parts

__all__ = ["divide_experts", "expert_modules", "expert_params", "undivide_experts"]

ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


def divide_experts(model: nn.Module, group: Group) -> list[str]:
    """Shard the experts of a model over ranks, in place; no tokens are dropped.

    Each rank calls the model with different tokens. Parameters keep their names and objects; see
    `average_gradients` for their gradients.

    Args:
        model: Model, equal on all ranks.
        group: Ranks that share the experts.

    Returns:
        Names of the modules with experts that were sharded.

    Raises:
        ConfigError: The model has no experts in a supported form (see the module docstring), their
            number cannot be divided, or they are sharded already. Nothing has been changed.
    """
    names = list(expert_modules(model))
    problems = []
    if not names:
        problems.append(
            f"{type(model).__name__} has no module of experts (a module with three-dimensional "
            f"parameters, an attribute num_experts and forward({', '.join(ARGUMENTS)})): build "
            "its layers with MixtureOfExperts"
        )
    for name in names:
        module = model.get_submodule(name)
        if _is_divided(module):
            problems.append(
                f"the experts of {name} are already sharded: call this function once per model"
            )
            continue
        problems += [f"{name}: {p}" for p in check_experts(_number(module), group.size)]
    raise_all(problems)
    for name in names:
        _divide(model.get_submodule(name), group)
    note_parts(model)
    return names


@torch.no_grad()
def undivide_experts(model: nn.Module, group: Group) -> None:
    """Gather sharded experts on all ranks, in place; gradients are dropped.

    Args:
        model: Model that `divide_experts` has sharded.
        group: Ranks that share the experts.

    Cost: an all_gather of each expert parameter.
    """
    for _, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            module.undivide()
        elif _has_experts(module) and "forward" in module.__dict__:
            for param in _params(module):
                param.data = group.all_gather(param.detach().contiguous())
                param.grad = None
                param.__dict__.pop("braid_experts")
                unmark_part(param)
            cast("Any", module).num_experts = _number(module) * group.size
            del module.__dict__["forward"]


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return by name the modules of a model with experts that `divide_experts` shards."""
    return {name: module for name, module in model.named_modules() if _has_experts(module)}


def expert_params(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module of `expert_modules` that differ between experts."""
    if isinstance(module, MixtureOfExperts):
        return [module.up, module.down]
    return list(_params(module))


def _divide(module: nn.Module, group: Group) -> None:
    """Keep this rank's experts, and replace forward by one that sends tokens to all experts."""
    if isinstance(module, MixtureOfExperts):
        module.divide(group)
        return
    total = _number(module)
    experts = slice(group.rank * total // group.size, (group.rank + 1) * total // group.size)
    for param in _params(module):
        param.data = param.data[experts].clone()
        param.grad = None
        mark_experts(group, param)
    whole = module.forward
    module.__dict__["forward"] = partial(_forward, group, whole, total)
    cast("Any", module).num_experts = total // group.size


def _forward(
    group: Group,
    local_experts: Any,
    num_experts: int,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Run experts of all ranks on this rank's tokens; `local_experts` runs this rank's experts."""

    def experts(rows: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        if not len(rows):
            return rows
        index = local.unsqueeze(1)
        return cast(
            "torch.Tensor", local_experts(rows, index, torch.ones_like(index, dtype=rows.dtype))
        )

    return Dispatch(group, top_k_index, num_experts).run(hidden_states, top_k_weights, experts)


def _has_experts(module: nn.Module) -> bool:
    """Return whether a module has experts in the supported form."""
    if isinstance(module, MixtureOfExperts):
        return True
    if not isinstance(getattr(module, "num_experts", None), int) or not list(_params(module)):
        return False
    if "forward" in module.__dict__:
        return True
    return list(inspect.signature(module.forward).parameters)[:3] == ARGUMENTS


def _params(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that have the experts as first dim."""
    for param in module.parameters(recurse=False):
        if param.dim() > 1 and len(param) == _number(module):
            yield param


def _is_divided(module: nn.Module) -> bool:
    """Return whether a module's experts have been sharded."""
    if isinstance(module, MixtureOfExperts):
        return module.group.size > 1
    return "forward" in module.__dict__


def _number(module: nn.Module) -> int:
    return cast("int", module.num_experts)
