"""Refusal of torch's functions that would be wrong while a rank has only a part of a model.

Problem: `torch.nn.utils.clip_grad_norm_` computes the norm of the gradients of one rank. If other
ranks have other layers or other shards, each rank scales by a different factor; if gradients are
still being added over ranks, it scales terms of sums. `torch.amp.GradScaler` skips a step only on
the ranks that find infinite gradients. Muon and Adafactor use the norm of each parameter, and LBFGS
inner products of all parameters together. And `if rank == 0: torch.save(...)` saves the part of
rank 0: parts often have equal shapes, so all ranks can load it. Most programs call one of these
functions, and without an error their results would be wrong.

Idea: engines note their parameters, with a function that returns why torch's functions cannot be
used now, and which call is right. Parameters that are shards by themselves carry the right calls as
an attribute. These functions of torch are wrapped when this module is imported, since programs call
them without an object of braid; they raise an error with this text. State dicts name the part that
they have: of an optimizer in an entry, of a model in the metadata, which dicts of other types lack.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from braid.errors import ConfigError
from braid.parallel.gradients.optimizer_kinds import kind_of_optimizer
from braid.runtime.torch_internals import (
    PART_ENTRY,
    around_optimizer_states,
    before_clipping,
    before_unscaling,
    own_parameters,
)

__all__ = [
    "PartOfModel",
    "Use",
    "check_steps",
    "check_when_loaded",
    "engines_of",
    "forget_incomplete",
    "has_own",
    "is_part",
    "mark_part",
    "name_in_state_dict",
    "note_incomplete",
    "note_parts",
    "part_of",
    "unmark_part",
    "warn_in_state_dict",
]

Use: TypeAlias = Literal[
    "clip_grad_norm_", "clip_grad_value_", "get_total_norm", "GradScaler", "LBFGS"
]
# (engine, parameters, function of torch) -> why the function cannot be used, or nothing
Refusal: TypeAlias = Callable[[Any, Sequence[torch.Tensor], Use], str]
PART = "braid_part"  # attribute of parameters that are shards, and entry of metadata
SHARDS = (
    "state_dict() of a model that is divided over ranks has only this rank's part ({}): save it on "
    "each rank in a separate file, or save a checkpoint by braid.save, which takes a HybridParallel"
)
# others may let ranks agree on infinite gradients, as `AgreedGradScaler` does
LOCAL_SCALERS = {f"torch.{place}amp.grad_scaler" for place in ("", "cuda.", "cpu.")}


class PartOfModel(NamedTuple):
    """Calls that regard the gradients of all ranks among which a model is divided.

    Attributes:
        clip: Call that clips gradients by their norm.
        scaler: Expression that makes a gradient scaler.
        has_whole: Whether each parameter is whole on its rank, so that it can be clipped alone.
        part: Name of this rank's part, such as "tensor shard 0 of 2"; empty if it is unknown.
    """

    clip: str
    scaler: str
    has_whole: bool = False
    part: str = ""

    def refusal(self, _engine: object, params: Sequence[torch.Tensor], use: Use) -> str:
        """Return why a function of torch cannot be used on parameters of a part; else nothing."""
        if use in ("GradScaler", "LBFGS"):
            return self.text(use)
        has_grads = any(param.grad is not None for param in params)
        is_whole = self.has_whole and len(params) == 1
        return "" if use == "clip_grad_value_" or is_whole or not has_grads else self.text(use)

    def text(self, use: Use) -> str:
        """Return why a function of torch cannot be used, and what to call instead."""
        if use == "GradScaler":
            return (
                "torch's GradScaler skips a step on the ranks with infinite gradients only; the "
                "model is divided over ranks, and the others would still step: use "
                f"{self.scaler} instead"
            )
        if use == "LBFGS":
            return (
                "LBFGS takes inner products of all parameters together, but the model is divided "
                "over ranks, and each would step along its own direction: use AdamW, or another "
                "optimizer that updates each element"
            )
        alone = ", or pass one parameter at a time" if self.has_whole else ""
        result = ", which returns the norm over all ranks" if use == "get_total_norm" else ""
        return (
            f"torch's {use} computes the norm of this rank's gradients only, but the model is "
            f"divided over ranks, which would scale by different factors: call {self.clip} "
            f"instead{result}{alone}"
        )


class _Noted(NamedTuple):
    """Parameters of an engine by a function, since weak references would forbid `swap_tensors`."""

    engine: weakref.ref[Any]
    params: Callable[[Any], Iterable[torch.Tensor]]
    refusal: Refusal
    part: str
    check_step: Callable[[Any, torch.optim.Optimizer], None] | None = None


_NOTED: dict[int, _Noted] = {}  # by the engine's id, in the order of notes
_NAMED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules whose state dicts name parts


def note_incomplete(
    engine: object,
    params: Callable[[Any], Iterable[torch.Tensor]],
    refusal: Refusal,
    part: str = "",
) -> None:
    """Ask `refusal` before torch's functions use gradients of an engine's parameters.

    Args:
        engine: The engine; the note ends with it. Its latest note counts, and of several engines
            the latest one is asked first.
        params: Function that returns the parameters of the engine.
        refusal: Function that returns why a function of torch cannot be used.
        part: Name of the part of a model that the parameters are; empty if they are whole.
    """
    key = id(engine)
    if _NOTED.pop(key, None) is None:
        weakref.finalize(engine, _NOTED.pop, key, None).atexit = False
    _NOTED[key] = _Noted(weakref.ref(engine), params, refusal, part)


def forget_incomplete(engine: object) -> None:
    """Allow torch's functions on the parameters of an engine again."""
    _NOTED.pop(id(engine), None)


def check_steps(engine: Any, check: Callable[[Any, torch.optim.Optimizer], None]) -> None:
    """Call `check` with a noted engine and each optimizer that steps on its parameters, before."""
    _NOTED[id(engine)] = _NOTED[id(engine)]._replace(check_step=check)


def engines_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the engines that have noted parameters of an optimizer, the latest first."""
    ids = set(map(id, _params_of(optimizer)))
    return [e for e, noted in _noted() if not ids.isdisjoint(map(id, noted.params(e)))]


def _noted() -> Iterator[tuple[Any, _Noted]]:
    for noted in reversed(_NOTED.copy().values()):  # the garbage collector may remove some
        engine = noted.engine()
        if engine is not None:
            yield engine, noted


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


def mark_part(param: torch.Tensor, calls: PartOfModel) -> None:
    """Refuse torch's functions on a parameter that is a shard, and name the right calls."""
    param.__dict__[PART] = calls


def unmark_part(param: torch.Tensor) -> None:
    """Allow torch's functions on a parameter that is whole again."""
    param.__dict__.pop(PART, None)


def is_part(param: torch.Tensor) -> bool:
    """Return whether a parameter is a shard."""
    return PART in param.__dict__


def part_of(param: torch.Tensor) -> str:
    """Return the name of the part that a parameter is; empty if it is whole."""
    return param.__dict__[PART].part if is_part(param) else ""


def note_parts(module: nn.Module) -> None:
    """Note a module with shards, which torch's functions may use without the parameters.

    They may get the gradients, or the module, whose state dicts then name the parts.
    """
    if id(module) not in _NOTED:
        warn_in_state_dict(module, _warning_of_shards)
    note_incomplete(module, _parts, _refusal_of_part)
    for inner in module.modules():
        if _part_in(inner) and inner not in _NAMED:
            _NAMED.add(inner)
            name_in_state_dict(inner, _part_in)
            check_when_loaded(inner, _part_in)
            hooked: Any = inner  # torch's method has no types
            hooked.register_load_state_dict_pre_hook(_refuse_assigning)


def _warning_of_shards(module: nn.Module) -> str:
    params = _parts(module)
    return SHARDS.format(part_of(params[0])) if params else ""


def _part_in(module: nn.Module) -> str:
    """Return the name of the part that a module's own parameters are; empty if they are whole."""
    for param in own_parameters(module).values():
        calls: PartOfModel | None = None if param is None else param.__dict__.get(PART)
        if calls is not None:
            return calls.part
    return ""


def _parts(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if is_part(param)]


def _refusal_of_part(_module: nn.Module, params: Sequence[torch.Tensor], use: Use) -> str:
    calls: PartOfModel = next(param.__dict__[PART] for param in params if is_part(param))
    return calls.refusal(None, params, use)


def _check(tensors: Sequence[torch.Tensor], use: Use) -> None:
    """Raise if a function of torch cannot be used on these parameters, or gradients, now."""
    ids = set(map(id, tensors))
    for engine, noted in _noted():
        of_gradients = use == "get_total_norm"
        known = {id(p.grad if of_gradients else p): p for p in noted.params(engine)}
        if not ids.isdisjoint(known):
            params = [known.get(id(tensor), tensor) for tensor in tensors]
            _raise_if(noted.refusal(engine, params, use))
    for param in () if use == "get_total_norm" else tensors:
        counts = param.requires_grad if use in ("GradScaler", "LBFGS") else param.grad is not None
        if is_part(param) and counts:
            _raise_if(param.__dict__[PART].refusal(None, tensors, use))


def _raise_if(text: str) -> None:
    if text:
        raise ConfigError(text)


def _parts_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the names of the parts on which an optimizer steps here; empty for whole models."""
    params = _params_of(optimizer)
    ids = set(map(id, params))
    names = set(map(part_of, params))
    for engine, noted in _noted():
        if noted.part and not ids.isdisjoint(map(id, noted.params(engine))):
            names.add(noted.part)
    return ", ".join(sorted(names - {""}))


def _check_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raise if a state belongs to another part than the optimizer."""
    here, there = _parts_of(optimizer), state.get(PART_ENTRY, "")
    if here and there and there != here:
        raise ConfigError(_another_part("state dict of an optimizer", there, here))
    if not here or there or kind_of_optimizer(optimizer) != "by elements":
        return
    saved = [key for group in state["param_groups"] for key in group["params"]]
    for key, param in zip(saved, _params_of(optimizer), strict=False):  # torch compares lengths
        for name, value in state["state"].get(key, {}).items():
            if isinstance(value, torch.Tensor) and value.numel() > max(1, param.numel()):
                msg = (
                    f"this state dict of an optimizer has {name} of shape {list(value.shape)} for "
                    f"a parameter whose part here ({here}) has shape {list(param.shape)}: load a "
                    "state of the same part, or use braid.load before or after the model is divided"
                )
                raise ConfigError(msg)


def _check_scaler(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise if a scaler of torch cannot be used on the parameters of an optimizer."""
    if scaler.is_enabled() and type(scaler).__module__ in LOCAL_SCALERS:
        _check(_params_of(optimizer), "GradScaler")


def _check_step(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    """Raise if an optimizer cannot step on the parameters that it has."""
    kind = kind_of_optimizer(optimizer)
    if kind == "together":
        _check(_params_of(optimizer), "LBFGS")
    if kind == "whole":
        parts = [p for p in _params_of(optimizer) if is_part(p) and p.requires_grad]
        if parts:
            msg = (
                f"{type(optimizer).__name__} uses the shapes or norms of whole parameters, but "
                f"{len(parts)} of its parameters, the first of shape {list(parts[0].shape)}, are "
                "parts of layers that are divided over ranks: use AdamW, or another optimizer "
                "that updates each element"
            )
            raise ConfigError(msg)
    checked = [(e, noted) for e, noted in _noted() if noted.check_step is not None]
    ids = set(map(id, _params_of(optimizer))) if checked else set()
    for engine, noted in checked:
        if noted.check_step and not ids.isdisjoint(map(id, noted.params(engine))):
            noted.check_step(engine, optimizer)


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    groups = getattr(optimizer, "param_groups", ())
    return [param for group in groups for param in group["params"]]


around_optimizer_states(_parts_of, _check_state)
before_clipping(_check)
before_unscaling(_check_scaler)
register_optimizer_step_pre_hook(_check_step)
