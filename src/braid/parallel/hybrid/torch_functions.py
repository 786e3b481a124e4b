"""Functions of torch that would give wrong results for a model on a mesh, refused or warned of."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from braid.parallel.gradients.incomplete import (
    PartOfModel,
    Use,
    forget_incomplete,
    is_part,
    note_incomplete,
)

if TYPE_CHECKING:  # the engine calls these functions
    from braid.parallel.hybrid.hybrid import HybridParallel

__all__ = ["guard", "release"]

CALLS = PartOfModel(
    "clip_grad_norm_(max_norm) of HybridParallel",
    "braid.parallel.gradients.AgreedGradScaler(list(hybrid.groups.values()), device)",
)
OLD_LAYERS = (
    "state_dict() of a model on {} stages has trained values only for the layers of this rank's "
    "stage, and old values for all others: call make_whole() of HybridParallel before it, or save "
    "a checkpoint by braid.save"
)


def guard(engine: HybridParallel) -> RemovableHandle | None:
    """Refuse torch's clipping and loss scaling, and warn of old values in `state_dict`."""
    params = [*engine.model.parameters(), *engine.named_pieces().values()]
    note_incomplete(params, _refusal, engine)
    num_stages = engine.groups["pp"].size
    if num_stages == 1:
        return None

    model: Any = engine.model  # torch's method has no types
    handle: RemovableHandle = model.register_state_dict_pre_hook(partial(_warn, num_stages))
    return handle


def release(engine: HybridParallel, handle: RemovableHandle | None) -> None:
    """Allow torch's functions, since the model is whole."""
    forget_incomplete(engine)
    forget_incomplete(engine.pipeline)
    if handle is not None:
        handle.remove()


def _refusal(engine: HybridParallel, params: Sequence[torch.Tensor], use: Use) -> str:
    """Return why a function of torch cannot be used; see `PartOfModel`."""
    if engine.sharding is not None:  # pieces have the gradients
        trained = any(param.requires_grad or param.grad is not None for param in params)
        return CALLS.text(use) if trained and use != "clip_grad_value_" else ""
    if engine.groups["pp"].size == 1 and not any(map(is_part, params)):
        return ""
    return CALLS.refusal(engine, params, use)


def _warn(num_stages: int, _module: object, _prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # braid's own calls need the names only
        warnings.warn(OLD_LAYERS.format(num_stages), UserWarning, stacklevel=3)
