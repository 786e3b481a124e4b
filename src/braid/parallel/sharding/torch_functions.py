"""Functions of torch that would give wrong results for a sharded model, refused or warned of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from braid.errors import raise_all
from braid.parallel.gradients.incomplete import (
    PartOfModel,
    Use,
    forget_incomplete,
    note_incomplete,
)
from braid.parallel.gradients.state_parts import (
    check_when_loaded,
    name_in_state_dict,
    warn_in_state_dict,
)
from braid.parallel.sharding.flat_gradients import STAGE_OF_PARAMETERS
from braid.runtime.torch_internals import accumulate_hooks
from braid.types import first_few

if TYPE_CHECKING:  # the engine calls these functions
    from braid.parallel.sharding.engine import Sharding

__all__ = ["check_unchanged", "guard", "release"]

CALLS = PartOfModel(
    "clip_grad_norm_(max_norm) of the wrapped model, or of the result of shard_optimizer",
    "braid.parallel.sharding.ShardedGradScaler(sharding), with the result of shard_optimizer or "
    "`sharding` of the wrapped model,",
)
PIECES = (
    "state_dict() of a model that is sharded at stage 3 has only this rank's flat pieces: call it "
    "on all ranks inside of `with sharding.gathered():`, with the result of shard_optimizer or "
    "`sharding` of the wrapped model or HybridParallel, or save a checkpoint by braid.save"
)


class GuardedModel(NamedTuple):
    """Changes that `guard` has made to a model.

    Attributes:
        hooks: Hooks of `state_dict` and `load_state_dict`.
        zero_grad: Attribute of the model before, if it had one.
    """

    hooks: list[RemovableHandle]
    zero_grad: Callable[..., object] | None


def guard(engine: Sharding) -> GuardedModel:
    """Refuse torch's clipping and scaling, warn of pieces in `state_dict`, extend `zero_grad`."""
    group = engine.places.group
    part = f"shard {group.rank} of {group.size}" if group.size > 1 else ""
    note_incomplete(engine, _objects, _refusal, part)
    reference, model_reference = weakref.ref(engine), weakref.ref(engine.model)
    before = vars(engine.model).get("zero_grad")

    def text(model: nn.Module) -> str:
        sharding = reference()
        table = () if sharding is None else sharding.table
        here = {name: param.shape for name, param in model.named_parameters()}
        return PIECES if any(here.get(r.name, r.spec.shape) != r.spec.shape for r in table) else ""

    def part_of(model: nn.Module) -> str:
        return part if text(model) else ""

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        sharding, model = reference(), model_reference()
        if sharding is not None:
            sharding.zero_grad()  # first, since torch's method may write to gradients
        if before is not None:
            before(*args, **kwargs)
        elif model is not None:
            type(model).zero_grad(model, *args, **kwargs)

    if engine.options.stage != STAGE_OF_PARAMETERS:  # else pieces are the model's parameters
        vars(engine.model)["zero_grad"] = zero_grad
    hooks = [
        warn_in_state_dict(engine.model, text),
        name_in_state_dict(engine.model, part_of),
        check_when_loaded(engine.model, part_of),
    ]
    return GuardedModel(hooks, before)


def release(engine: Sharding, changed: GuardedModel) -> None:
    """Allow torch's functions, since the engine has been closed."""
    forget_incomplete(engine)
    vars(engine.model).pop("zero_grad", None)
    if changed.zero_grad is not None:
        vars(engine.model)["zero_grad"] = changed.zero_grad
    for hook in changed.hooks:
        hook.remove()


def check_unchanged(engine: Sharding) -> None:
    """Check that the parameters are as the engine has sharded them.

    Raises:
        ConfigError: Parameters were moved, converted, replaced or unfrozen, or have hooks that
            would never run.
    """
    problems = []
    if moved := [name for flat in engine.flats for name in flat.moved()]:
        problems.append(
            f"{first_few(moved)} were moved, converted or replaced after sharding: call "
            "model.to(...) and model.half() before, and load_state_dict without assign=True"
        )
    trained = {id(gradients.flat) for gradients in engine.gradients}
    frozen = [flat for flat in engine.flats if id(flat) not in trained]
    if names := [r.name for f in frozen for r in f.records if r.param.requires_grad]:
        problems.append(
            f"{first_few(names)} were frozen when the model was sharded, but now require a "
            "gradient: unfreeze them before sharding"
        )
    if engine.options.stage == STAGE_OF_PARAMETERS:
        hooked = [record.name for record, owned in engine.owned() if accumulate_hooks(owned)]
    else:
        hooked = engine.reducer.later_hooks()
    if hooked:
        problems.append(
            f"post-accumulate hooks of {first_few(hooked)} would run without a gradient or never, "
            "since gradients are averaged and stored in pieces: use register_hook, which gets this "
            "rank's gradient, or change the gradients of the pieces after backward"
        )
    raise_all(problems)


def _objects(engine: Sharding) -> Iterator[torch.Tensor]:
    """Yield all objects that a program may take for the model's parameters."""
    for flat in engine.flats:
        for record, owned, leaf in zip(flat.records, flat.owned, flat.leaves, strict=True):
            yield from (record.param, owned, leaf)


def _refusal(engine: Sharding, params: Sequence[torch.Tensor], use: Use) -> str:
    """Return why a function of torch cannot be used; see `PartOfModel`."""
    moved = {id(record.param) for record, owned in engine.owned() if owned is not record.param}
    has_moved = any(param.requires_grad and id(param) in moved for param in params)
    if has_moved and use == "clip_grad_value_":
        return (
            f"at stage {engine.options.stage}, gradients belong to this rank's pieces and not to "
            "the model's parameters: pass the optimizer's parameters to clip_grad_value_"
        )
    if has_moved and use in ("clip_grad_norm_", "get_total_norm"):
        return CALLS.text(use)
    return "" if engine.places.group.size == 1 else CALLS.refusal(engine, params, use)
