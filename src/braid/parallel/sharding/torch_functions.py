"""Functions of torch that would give wrong results for a sharded model, refused or warned of."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from braid.parallel.gradients.incomplete import (
    PartOfModel,
    Use,
    forget_incomplete,
    note_incomplete,
)

if TYPE_CHECKING:  # the engine calls these functions
    from braid.parallel.sharding.engine import Sharding

__all__ = ["guard", "release"]

STAGE_OF_PARAMETERS = 3
CALLS = PartOfModel(
    "clip_grad_norm_(max_norm) of the wrapped model, or of the result of shard_optimizer,",
    "braid.parallel.sharding.ShardedGradScaler",
)
PIECES = (
    "state_dict() of a model that is sharded at stage 3 has only this rank's flat pieces: call it "
    "inside of `with sharding.gathered():` on all ranks, or save a checkpoint by braid.save"
)


def guard(engine: Sharding) -> RemovableHandle:
    """Refuse torch's clipping and scaling, warn of pieces in `state_dict`, let `zero_grad` work."""
    note_incomplete(_objects(engine), _refusal, engine)
    reference = weakref.ref(engine)

    def warn(_module: nn.Module, _prefix: str, keep_vars: bool) -> None:
        sharding = reference()
        if sharding is None or keep_vars:  # which braid's calls pass
            return
        if any(record.param.shape != record.spec.shape for record in sharding.table):
            warnings.warn(PIECES, UserWarning, stacklevel=3)

    def zero_grad(set_to_none: bool = True) -> None:  # noqa: ARG001 - torch's signature
        sharding = reference()
        if sharding is not None:
            sharding.zero_grad()

    if engine.options.stage != STAGE_OF_PARAMETERS:  # else pieces are the model's parameters
        vars(engine.model)["zero_grad"] = zero_grad
    model: Any = engine.model  # torch's method has no types
    handle: RemovableHandle = model.register_state_dict_pre_hook(warn)
    return handle


def release(engine: Sharding, handle: RemovableHandle) -> None:
    """Allow torch's functions, since the engine has been closed."""
    forget_incomplete(_objects(engine), engine)
    vars(engine.model).pop("zero_grad", None)
    handle.remove()


def _objects(engine: Sharding) -> Iterator[torch.Tensor]:
    """Yield all objects that a program may take for the model's parameters."""
    for flat in engine.flats:
        for record, owned, leaf in zip(flat.records, flat.owned, flat.leaves, strict=True):
            yield from (record.param, owned, leaf)


def _refusal(engine: Sharding, params: Sequence[torch.Tensor], use: Use) -> str:
    moved = {id(record.param) for record, owned in engine.owned() if owned is not record.param}
    has_no_grad = any(id(param) in moved for param in params)
    if has_no_grad and use == "clip_grad_value_":
        return (
            f"at stage {engine.options.stage}, gradients belong to this rank's pieces and not to "
            "the model's parameters: pass the optimizer's parameters to clip_grad_value_"
        )
    is_alone = engine.places.group.size == 1
    return "" if is_alone and not has_no_grad else CALLS.refusal(engine, params, use)
