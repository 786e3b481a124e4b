"""Kinds of optimizers for sharding, and optimizer steps and scalers for this rank's pieces.

by elements   each element changes by its own gradient and state: bits do not depend on the sharding
whole         updates use the shape or norm of a parameter: each parameter belongs to one rank
not at all    LBFGS takes inner products of all parameters; SparseAdam takes sparse gradients
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from braid.errors import ConfigError, raise_all
from braid.parallel.gradients.first_batch import FirstBatch
from braid.parallel.gradients.grad_scaler import AgreedGradScaler
from braid.parallel.gradients.hashing import compare_optimizers
from braid.parallel.gradients.incomplete import check_steps, engines_of
from braid.parallel.gradients.optimizer_in_place import refuse_copy
from braid.parallel.gradients.optimizer_kinds import kind_of_optimizer, refusal_of_optimizer
from braid.parallel.gradients.process_groups import group_of
from braid.parallel.sharding.engine import Sharding
from braid.parallel.sharding.options import ShardingOptions

__all__ = [
    "ShardedGradScaler",
    "attach",
    "check_first_batch",
    "has_pieces",
    "needs_whole",
    "refuse_wrong_rules",
    "shard_optimizer",
]

_WARNED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # of an empty group


def needs_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer needs whole parameters, because it uses shapes or norms.

    Unknown optimizers are assumed to need them, with a warning.

    Raises:
        ConfigError: The optimizer cannot be sharded.
    """
    _check_known(optimizer)
    name, kind = type(optimizer).__name__, kind_of_optimizer(optimizer)
    if kind == "by elements":
        return False
    if kind == "unknown":
        warnings.warn(
            f"{name} may not update each element independently, so each rank gets whole "
            "parameters: pass whole=False if it does, or whole=True to silence this warning",
            UserWarning,
            stacklevel=3,
        )
    return True


def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    stage: int = 1,
    process_group: Any = None,
    whole: bool | None = None,
    **options: Any,
) -> Sharding:
    """Shard the states of an optimizer over ranks; by stage also gradients and parameters (ZeRO).

    The model and the optimizer stay the same objects. Call `clip_grad_norm_` and `zero_grad` of the
    returned engine, since gradients belong to this rank's pieces at all stages.

    Args:
        optimizer: Optimizer of the model; existing states are sharded.
        model: The model; the same on all ranks, except for values.
        stage: 1 for optimizer states, 2 for gradients too, 3 for parameters too.
        process_group: Ranks that own the shards; see `DistributedDataParallel`.
        whole: Whether each parameter belongs to one rank; None to decide by the optimizer.
        options: Further fields of `ShardingOptions`.

    Raises:
        ConfigError: The model or the optimizer cannot be sharded.
        MismatchError: Parameters or options differ between ranks; the message shows which.

    Cost: see `Sharding`.
    """
    if whole is not None:
        _check_known(optimizer)
    needs = needs_whole(optimizer) if whole is None else whole
    sharding = Sharding(
        model,
        group_of(process_group),
        ShardingOptions(stage=stage, whole=needs, **options),
    )
    attach(sharding, optimizer, whole=whole)
    refuse_wrong_rules(sharding)
    check_first_batch(sharding)
    return sharding


def attach(
    sharding: Sharding, optimizer: torch.optim.Optimizer, *, whole: bool | None = None
) -> None:
    """Replace an optimizer's parameters by this rank's shards, and shard its states.

    Args:
        sharding: Engine that has sharded the optimizer's parameters.
        optimizer: Optimizer of the model, created before or after sharding.
        whole: Whether it needs whole parameters; None to decide by its name.

    Raises:
        ConfigError: The optimizer cannot be sharded in this way, or has parameters that the engine
            has not sharded.
        MismatchError: The optimizer has different settings or states on the ranks.
    """
    _check(sharding, optimizer, whole)
    places = {}
    shapes: dict[torch.Tensor, torch.Size] = {}
    for flat in sharding.flats:
        for index, record in enumerate(flat.records):
            places[id(record.param)] = places[id(flat.owned[index])] = (flat, index)
            shapes[record.param] = shapes[flat.owned[index]] = flat.shapes[index]
    for ranks in sharding.places.groups:
        compare_optimizers(ranks, optimizer, shapes)
    for group in optimizer.param_groups:
        group["params"] = [
            flat.owned[index] for flat, index in (places[id(p)] for p in group["params"])
        ]
    states = dict(optimizer.state)
    optimizer.state.clear()
    for param, state in states.items():
        flat, index = places[id(param)]
        if flat.pieces[index].numel:
            piece, shape = flat.pieces[index], flat.shapes[index]
            optimizer.state[flat.owned[index]] = {
                name: _cut(value, shape, piece.begin, piece.end, whole=flat.whole)
                for name, value in state.items()
            }
    if sharding.disk is not None:
        sharding.disk.register(optimizer)
    reference = weakref.ref(sharding)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Attached, kind), {"braid_sharding": reference})

    def before_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        engine = reference()
        if engine is not None:
            engine.reducer.check_step()

    def after_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        engine = reference()
        if engine is not None:
            engine.share_step()

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)


def check_first_batch(sharding: Sharding) -> None:
    """Log probable mistakes in the first batches of a sharded model; see `FirstBatch`."""
    advice = "use batches of one size, or leave out the last samples"
    first = FirstBatch(sharding.model, sharding.places.group, advice)
    sharding.reducer.first_batch = first

    def note(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            handle.remove()
            first.note_input(args, kwargs)

    handle = sharding.model.register_forward_pre_hook(note, with_kwargs=True)


def refuse_wrong_rules(sharding: Sharding) -> None:
    """Make steps of optimizers raise if `attach` has not changed them and they cannot use pieces.

    Without this check LBFGS, or optimizers that use norms, would step on pieces as if they were
    parameters. At stages 1 and 2 any optimizer would find no gradients, and change nothing.
    """
    check_steps(sharding, _check_step)


def has_pieces(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer steps on the pieces of a sharded model."""
    engines = engines_of(optimizer)
    return isinstance(optimizer, _Attached) or any(isinstance(e, Sharding) for e in engines)


def _check_step(engine: Sharding, optimizer: torch.optim.Optimizer) -> None:
    """Raise if an unattached optimizer cannot use the pieces of its parameters."""
    if isinstance(optimizer, _Attached):
        return
    _check_known(optimizer)
    name = type(optimizer).__name__
    if any(owned is not record.param for record, owned in engine.owned()):
        msg = (
            f"{name} has parameters of a sharded model, but gradients are stored in its shards: "
            "call sharding.attach(engine, optimizer), or attach(optimizer) of HybridParallel, "
            "before the first step"
        )
        raise ConfigError(msg)
    if kind_of_optimizer(optimizer) == "whole" and not engine.options.whole:
        msg = (
            f"{name} uses shapes or norms of whole parameters, but would get shards: wrap the "
            "model in FullyShardedDataParallel(model, whole_parameters=True), or call "
            "sharding.shard_optimizer(optimizer, model, stage=3) instead of wrapping"
        )
        raise ConfigError(msg)
    is_flat = any(owned.dim() < len(record.spec.shape) for record, owned in engine.owned())
    has_empty = not all(settings["params"] for settings in optimizer.param_groups)
    if is_flat and has_empty and optimizer not in _WARNED:
        _WARNED.add(optimizer)
        warnings.warn(
            f"{name} has a parameter group without parameters. Parameters of a sharded model are "
            "flat pieces, so param.dim() is 1 for each of them: choose groups by the names of "
            "parameters, or before the model is sharded, and then call shard_optimizer",
            UserWarning,
            stacklevel=2,
        )


class ShardedGradScaler(AgreedGradScaler):
    """A `torch.amp.GradScaler` for a sharded model; see `AgreedGradScaler`.

    Args:
        sharding: Engine of the model.
        options: Arguments of torch's scaler, such as `init_scale`.
    """

    def __init__(self, sharding: Sharding, **options: Any) -> None:
        places = sharding.places
        groups = [group for group in (places.group, places.replicas) if group is not None]
        super().__init__(groups, sharding.flats[0].master_device, **options)


class _Attached:
    """Methods of an optimizer that steps on pieces; its class becomes a subclass of this one."""

    braid_sharding: weakref.ref[Sharding]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero gradients, and drop local gradients from `no_sync`."""
        super().zero_grad(set_to_none)  # type: ignore[misc]  # of the optimizer
        engine = type(self).braid_sharding()
        if engine is not None:
            engine.reducer.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add this rank's pieces of parameters of the sharded model.

        Raises:
            ConfigError: The model does not have all of them, so they would not be averaged.
        """
        engine = type(self).braid_sharding()
        params = param_group["params"]
        if engine is not None and not isinstance(params, set):  # which torch refuses
            items = [params] if isinstance(params, torch.Tensor) else list(params)
            named = [x if isinstance(x, tuple) else ("", x) for x in items]
            raise_all(_strangers(engine, [param for _, param in named]))
            piece = _piece_by_id(engine)
            pieces = [(name, piece[id(x)]) if name else piece[id(x)] for name, x in named]
            param_group = {**param_group, "params": pieces}
        super().add_param_group(param_group)  # type: ignore[misc]  # of the optimizer

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise, since a copy or pickle would share this rank's pieces.

        Raises:
            ConfigError: Always.
        """
        refuse_copy("optimizer of a sharded model")


def _check_known(optimizer: torch.optim.Optimizer) -> None:
    """Raise for optimizers that cannot be sharded in any way."""
    reason = refusal_of_optimizer(optimizer)
    if reason is not None:
        msg = (
            f"{type(optimizer).__name__} cannot be sharded: {reason}. Use "
            "DistributedDataParallel, or another optimizer such as AdamW"
        )
        raise ConfigError(msg)


def _piece_by_id(sharding: Sharding) -> dict[int, nn.Parameter]:
    """Return this rank's pieces, by the ids of pieces and of the model's parameters."""
    return {id(x): owned for record, owned in sharding.owned() for x in (record.param, owned)}


def _strangers(sharding: Sharding, params: Sequence[torch.Tensor]) -> list[str]:
    """Return the problem of parameters that are not the model's; an empty list if all are."""
    known = _piece_by_id(sharding)
    strangers = [param for param in params if id(param) not in known]
    if not strangers:
        return []
    text = (
        f"the optimizer has {len(strangers)} parameters that are not the model's, the first of "
        f"shape {list(strangers[0].shape)}: make it from model.parameters()"
    )
    return [text]


def _check(sharding: Sharding, optimizer: torch.optim.Optimizer, whole: bool | None) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    problems = _strangers(sharding, params)
    _check_known(optimizer)
    if whole is None and not sharding.options.whole and needs_whole(optimizer):
        problems.append(
            f"{type(optimizer).__name__} needs whole parameters, but whole=False shards single "
            "elements: pass whole=True"
        )
    raise_all(problems)


def _cut(value: Any, shape: torch.Size, begin: int, end: int, *, whole: bool) -> Any:
    """Return this rank's piece of a state; states of another shape are returned unchanged."""
    if whole or not isinstance(value, torch.Tensor) or value.shape != shape or not shape:
        return value
    return value.reshape(-1)[begin:end].clone()
