"""Refusal of torch's clipping and loss scaling while gradients are incomplete on a rank.

Problem: `torch.nn.utils.clip_grad_norm_` computes the norm of the gradients of one rank. If other
ranks have other layers or other shards, each rank scales by a different factor; if gradients are
still being added over ranks, it scales terms of sums. `torch.amp.GradScaler` skips a step only on
the ranks that find infinite gradients. Most programs call one of them, and without an error their
results would be wrong.

Idea: engines note their parameters, with a function that returns why torch's functions cannot be
used now, and which call is right. Parameters that are shards by themselves carry the right calls as
an attribute. These functions of torch are wrapped when this module is imported, since programs call
them without an object of braid; they raise an error with this text.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from braid.errors import ConfigError
from braid.runtime.torch_internals import before_clipping, before_unscaling

__all__ = [
    "PartOfModel",
    "Use",
    "forget_incomplete",
    "is_part",
    "mark_part",
    "note_incomplete",
    "unmark_part",
]

Use: TypeAlias = Literal["clip_grad_norm_", "clip_grad_value_", "GradScaler"]
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
    """

    clip: str
    scaler: str
    has_whole: bool = False

    def refusal(self, _engine: object, params: Sequence[torch.Tensor], use: Use) -> str:
        """Return why a function of torch cannot be used on parameters of a part; else nothing."""
        has_grads = any(param.grad is not None for param in params)
        is_whole = self.has_whole and len(params) == 1
        if use == "clip_grad_value_" or (use == "clip_grad_norm_" and (is_whole or not has_grads)):
            return ""
        return self.text(use)

    def text(self, use: Use) -> str:
        """Return why a function of torch cannot be used, and what to call instead."""
        if use == "GradScaler":
            return (
                "torch's GradScaler skips a step on the ranks with infinite gradients only; the "
                "model is divided over ranks, and the others would still step: use "
                f"{self.scaler} instead"
            )
        alone = ", or pass one parameter at a time" if self.has_whole else ""
        return (
            "torch's clip_grad_norm_ computes the norm of this rank's gradients only, but the "
            "model is divided over ranks, which would scale by different factors: call "
            f"{self.clip} instead{alone}"
        )


class _Noted(NamedTuple):
    """Parameters of an engine, by id: a weak reference would forbid `torch.utils.swap_tensors`."""

    ids: frozenset[int]
    refusal: Refusal
    engine: weakref.ref[Any]


_NOTED: dict[int, _Noted] = {}  # by the engine's id, in the order of notes


def note_incomplete(params: Iterable[torch.Tensor], refusal: Refusal, engine: object) -> None:
    """Ask `refusal` before torch's functions use gradients of `params`.

    Args:
        params: Parameters, which live as long as the engine.
        refusal: Function that returns why a function of torch cannot be used.
        engine: Engine with these parameters; the note ends with it. Its latest note counts, and of
            several engines the latest one is asked first.
    """
    key = id(engine)
    if _NOTED.pop(key, None) is None:
        weakref.finalize(engine, _NOTED.pop, key, None).atexit = False
    _NOTED[key] = _Noted(frozenset(map(id, params)), refusal, weakref.ref(engine))


def forget_incomplete(engine: object) -> None:
    """Allow torch's functions on the parameters of an engine again."""
    _NOTED.pop(id(engine), None)


def mark_part(param: torch.Tensor, calls: PartOfModel) -> None:
    """Refuse torch's functions on a parameter that is a shard, and name the right calls."""
    param.__dict__[PART] = calls


def unmark_part(param: torch.Tensor) -> None:
    """Allow torch's functions on a parameter that is whole again."""
    param.__dict__.pop(PART, None)


def is_part(param: torch.Tensor) -> bool:
    """Return whether a parameter is a shard."""
    return PART in param.__dict__


def _check(params: Sequence[torch.Tensor], use: Use) -> None:
    """Raise if a function of torch cannot be used on these parameters now."""
    ids = set(map(id, params))
    for noted in reversed(_NOTED.copy().values()):  # the garbage collector may remove some
        engine = noted.engine()
        if engine is not None and not ids.isdisjoint(noted.ids):
            _raise_if(noted.refusal(engine, params, use))
    for param in params:
        if is_part(param) and (param.grad is not None or use == "GradScaler"):
            _raise_if(param.__dict__[PART].refusal(None, params, use))


def _raise_if(text: str) -> None:
    if text:
        raise ConfigError(text)


def _check_scaler(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise if a scaler of torch cannot be used on the parameters of an optimizer."""
    if scaler.is_enabled() and type(scaler).__module__ in LOCAL_SCALERS:
        groups = getattr(optimizer, "param_groups", ())
        _check([param for group in groups for param in group["params"]], "GradScaler")


before_clipping(_check)
before_unscaling(_check_scaler)
