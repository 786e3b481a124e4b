"""Functions of torch that would give wrong results for a model on a mesh, refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from braid.parallel.gradients.incomplete import (
    PartOfModel,
    Use,
    forget_incomplete,
    is_part,
    mark_part,
    note_incomplete,
    part_of,
)

if TYPE_CHECKING:  # the engine calls these functions
    from braid.parallel.hybrid.hybrid import HybridParallel

__all__ = ["guard", "release"]

CALLS = PartOfModel(
    "clip_grad_norm_(max_norm) of HybridParallel",
    "braid.parallel.gradients.AgreedGradScaler(list(hybrid.groups.values()), device)",
)


def guard(engine: HybridParallel) -> None:
    """Refuse torch's clipping and loss scaling, and optimizers that need whole parameters."""
    note_incomplete(engine, _params, _refusal)
    params = dict(engine.model.named_parameters())
    for name, piece in engine.named_pieces().items():
        if is_part(params[name]):
            mark_part(piece, CALLS._replace(part=part_of(params[name])))


def release(engine: HybridParallel) -> None:
    """Allow torch's functions, since the model is whole."""
    forget_incomplete(engine)
    forget_incomplete(engine.pipeline)
    engine.pipeline.other_layers.release()


def _params(engine: HybridParallel) -> list[torch.Tensor]:
    return [*engine.model.parameters(), *engine.named_pieces().values()]


def _refusal(engine: HybridParallel, params: Sequence[torch.Tensor], use: Use) -> str:
    """Return why a function of torch cannot be used; see `PartOfModel`."""
    if engine.sharding is not None:  # pieces have the gradients
        trained = any(param.requires_grad or param.grad is not None for param in params)
        return CALLS.text(use) if trained and use != "clip_grad_value_" else ""
    if engine.groups["pp"].size == 1 and not any(map(is_part, params)):
        return ""
    return CALLS.refusal(engine, params, use)
