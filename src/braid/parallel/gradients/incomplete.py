"""Refusal of torch's clipping, loss scaling and some optimizers while a rank has only a part.

Problem: `torch.nn.utils.clip_grad_norm_` computes the norm of the gradients of one rank. If other
ranks have other layers or other shards, each rank scales by a different factor; if gradients are
still being added over ranks, it scales terms of sums. `torch.amp.GradScaler` skips a step only on
the ranks that find infinite gradients. Muon and Adafactor use the norm of each parameter, and LBFGS
inner products of all parameters together. Most programs call one of them, and without an error
their results would be wrong.

Idea: engines note their parameters, with a function that returns why torch's functions cannot be
used now, and which call is right. Parameters that are shards by themselves carry the right calls as
an attribute. These functions of torch are wrapped when this module is imported, since programs call
them without an object of braid; they raise an error with this text. Notes also name the part that a
rank has, for `state_parts`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from braid.errors import ConfigError
from braid.parallel.gradients.optimizer_kinds import kind_of_optimizer
from braid.runtime.torch_internals import before_clipping, before_unscaling

__all__ = [
    "PartOfModel",
    "Use",
    "check_steps",
    "engines_of",
    "forget_incomplete",
    "is_part",
    "mark_part",
    "note_incomplete",
    "params_of",
    "part_of",
    "parts_in",
    "parts_of",
    "refusal_of_part",
    "unmark_part",
]

Use: TypeAlias = Literal[
    "clip_grad_norm_", "clip_grad_value_", "get_total_norm", "GradScaler", "LBFGS"
]
# (engine, parameters, function of torch) -> why the function cannot be used, or nothing
Refusal: TypeAlias = Callable[[Any, Sequence[torch.Tensor], Use], str]
PART = "braid_part"  # attribute of parameters that are shards
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
    ids = set(map(id, params_of(optimizer)))
    return [e for e, noted in _noted() if not ids.isdisjoint(map(id, noted.params(e)))]


def _noted() -> Iterator[tuple[Any, _Noted]]:
    for noted in reversed(_NOTED.copy().values()):  # the garbage collector may remove some
        engine = noted.engine()
        if engine is not None:
            yield engine, noted


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
    calls: PartOfModel | None = param.__dict__.get(PART)
    return "" if calls is None else calls.part


def parts_in(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module that are shards."""
    return [param for param in module.parameters() if is_part(param)]


def refusal_of_part(_module: nn.Module, params: Sequence[torch.Tensor], use: Use) -> str:
    """Return why a function of torch cannot be used on a module's shards; else nothing."""
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


def _check_scaler(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise if a scaler of torch cannot be used on the parameters of an optimizer."""
    if scaler.is_enabled() and type(scaler).__module__ in LOCAL_SCALERS:
        _check(params_of(optimizer), "GradScaler")


def _check_step(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    """Raise if an optimizer cannot step on the parameters that it has."""
    kind = kind_of_optimizer(optimizer)
    if kind == "together":
        _check(params_of(optimizer), "LBFGS")
    if kind == "whole":
        parts = [p for p in params_of(optimizer) if is_part(p) and p.requires_grad]
        if parts:
            msg = (
                f"{type(optimizer).__name__} uses the shapes or norms of whole parameters, but "
                f"{len(parts)} of its parameters, the first of shape {list(parts[0].shape)}, are "
                "parts of layers that are divided over ranks: use AdamW, or another optimizer "
                "that updates each element"
            )
            raise ConfigError(msg)
    checked = [(e, noted) for e, noted in _noted() if noted.check_step is not None]
    ids = set(map(id, params_of(optimizer))) if checked else set()
    for engine, noted in checked:
        if noted.check_step and not ids.isdisjoint(map(id, noted.params(engine))):
            noted.check_step(engine, optimizer)


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, in the order of its groups."""
    groups = getattr(optimizer, "param_groups", ())
    return [param for group in groups for param in group["params"]]


def parts_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the names of the parts on which an optimizer steps here; empty for whole models."""
    params = params_of(optimizer)
    ids = set(map(id, params))
    names = set(map(part_of, params))
    for engine, noted in _noted():
        if noted.part and not ids.isdisjoint(map(id, noted.params(engine))):
            names.add(noted.part)
    return ", ".join(sorted(names - {""}))


before_clipping(_check)
before_unscaling(_check_scaler)
register_optimizer_step_pre_hook(_check_step)
