"""State dicts that name the part of a model that they have, and refuse the part of another rank.

Problem: `if rank == 0: torch.save(...)` saves the part of rank 0, if the model is divided over
ranks. Parts often have equal shapes, so all ranks can load the file, and train other weights.

Idea: the state dict of an optimizer names the part in an entry, and the state dict of a model in
its metadata. Loading raises an error if the names differ. Programs may lose the metadata, as by
`{key: value.cpu() for key, value in state.items()}`, so `state_dict` also warns.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from braid.errors import ConfigError
from braid.parallel.gradients.incomplete import (
    is_part,
    note_incomplete,
    params_of,
    part_of,
    parts_in,
    parts_of,
    refusal_of_part,
)
from braid.parallel.gradients.optimizer_kinds import kind_of_optimizer
from braid.runtime.torch_internals import PART_ENTRY, around_optimizer_states, own_parameters

__all__ = ["check_when_loaded", "has_own", "name_in_state_dict", "note_parts", "warn_in_state_dict"]

PART = "braid_part"  # entry of metadata
SHARDS = (
    "state_dict() of a model that is divided over ranks has only this rank's part ({}): save it on "
    "each rank in a separate file, or save a checkpoint by braid.save, which takes a HybridParallel"
)
_NAMED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules with shards
_WARNING: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models with shards


def note_parts(module: nn.Module) -> None:
    """Refuse torch's functions on a module's shards, and name the shards in its state dicts."""
    note_incomplete(module, parts_in, refusal_of_part)
    if module not in _WARNING:
        _WARNING.add(module)
        warn_in_state_dict(module, _warning_of_shards)
    for inner in module.modules():
        if _part_in(inner) and inner not in _NAMED:
            _NAMED.add(inner)
            name_in_state_dict(inner, _part_in)
            check_when_loaded(inner, _part_in)
            hooked: Any = inner  # torch's method has no types
            hooked.register_load_state_dict_pre_hook(_refuse_assigning)


def _warning_of_shards(module: nn.Module) -> str:
    params = parts_in(module)
    return SHARDS.format(part_of(params[0])) if params else ""


def _part_in(module: nn.Module) -> str:
    """Return the name of the part that a module's own parameters are; empty if they are whole."""
    for param in own_parameters(module).values():
        if param is not None and (part := part_of(param)):
            return part
    return ""


def warn_in_state_dict(module: Any, text: Callable[[nn.Module], str]) -> RemovableHandle:
    """Warn by `text(module)`, unless it is empty, before a program calls `state_dict` of it."""
    handle: RemovableHandle = module.register_state_dict_pre_hook(partial(_warn_of_state, text))
    return handle


def _warn_of_state(
    text: Callable[[nn.Module], str], module: nn.Module, _prefix: str, keep_vars: bool
) -> None:
    if not keep_vars and (warning := text(module)):  # braid's calls keep variables
        warnings.warn(warning, UserWarning, stacklevel=3)


def name_in_state_dict(module: Any, part: Callable[[nn.Module], str]) -> RemovableHandle:
    """Name the part of a model that a module is, in the metadata of its state dicts."""
    handle: RemovableHandle = module.register_state_dict_post_hook(partial(_name_part, part))
    return handle


def check_when_loaded(module: Any, part: Callable[[nn.Module], str]) -> RemovableHandle:
    """Raise when a program loads another part into a module that is one."""
    hook = partial(_check_loaded, part)
    handle: RemovableHandle = module.register_load_state_dict_pre_hook(hook)
    return handle


def _name_part(
    part: Callable[[nn.Module], str],
    module: nn.Module,
    _state: object,
    _prefix: str,
    metadata: dict[str, Any],
) -> None:
    if name := part(module):
        metadata[PART] = name


def _check_loaded(
    part: Callable[[nn.Module], str],
    module: nn.Module,
    state: Mapping[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *_: object,
) -> None:
    here, there = part(module), metadata.get(PART)
    if here and there and there != here and has_own(module, state, prefix):
        what = f"state dict of {prefix.rstrip('.') or 'a model'}"
        raise ConfigError(_another_part(what, there, here))


def has_own(module: nn.Module, state: Mapping[str, Any], prefix: str) -> bool:
    """Return whether a state dict has parameters of a module; if some are shards, only of these."""
    named = dict(module.named_parameters())
    shards = [name for name, param in named.items() if is_part(param)]
    return any(prefix + name in state for name in shards or named)


def _refuse_assigning(
    module: nn.Module, _state: object, _prefix: str, metadata: dict[str, Any], *_: object
) -> None:
    if _part_in(module) and metadata.get("assign_to_params_buffers"):
        msg = (
            "load_state_dict(assign=True) would replace the shards of parameters by others, which "
            "are not known as shards: call it without assign=True, or before the model is divided"
        )
        raise ConfigError(msg)


def _another_part(what: str, there: str, here: str) -> str:
    return (
        f"this {what} has the part {there!r} of a model, but this rank has the part {here!r}: save "
        "and load each part in a separate file, on its rank, or save a checkpoint by braid.save, "
        "which any ranks can load"
    )


def _check_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raise if a state belongs to another part than the optimizer."""
    here, there = parts_of(optimizer), state.get(PART_ENTRY, "")
    if here and there and there != here:
        raise ConfigError(_another_part("state dict of an optimizer", there, here))
    if not here or there or kind_of_optimizer(optimizer) != "by elements":
        return
    saved = [key for group in state["param_groups"] for key in group["params"]]
    for key, param in zip(saved, params_of(optimizer), strict=False):  # torch compares lengths
        for name, value in state["state"].get(key, {}).items():
            if isinstance(value, torch.Tensor) and value.numel() > max(1, param.numel()):
                msg = (
                    f"this state dict of an optimizer has {name} of shape {list(value.shape)} for "
                    f"a parameter with a part of shape {list(param.shape)} here ({here}): load a "
                    "state of the same part, or use braid.load before or after the model is divided"
                )
                raise ConfigError(msg)


around_optimizer_states(parts_of, _check_state)
