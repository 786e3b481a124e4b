"""Refusal of torch's clipping and loss scaling while gradients are incomplete on a rank.

Problem: `torch.nn.utils.clip_grad_norm_` computes the norm of the gradients of one rank. If other
ranks have other layers or other shards, each rank scales by a different factor; if gradients are
still being added over ranks, it scales terms of sums. `torch.amp.GradScaler` skips a step only on
the ranks that find infinite gradients. Most programs call one of them, and without an error their
results would be wrong.

Idea: engines note their parameters, with a function that says why torch's functions cannot be used
at the moment, and which call is right. These functions of torch are wrapped once; they raise an
error with this text.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from braid.errors import ConfigError
from braid.parallel.gradients.grad_scaler import AgreedGradScaler
from braid.runtime.torch_internals import before_clipping, before_unscaling

__all__ = ["PartOfModel", "Use", "forget_incomplete", "note_incomplete", "rename_calls"]

Use: TypeAlias = Literal["clip_grad_norm_", "clip_grad_value_", "GradScaler"]
# (engine, parameters, function of torch) -> why the function cannot be used, or nothing
Refusal: TypeAlias = Callable[[Any, Sequence[torch.Tensor], Use], str]


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
        """Return why a function of torch cannot be used; empty if it can."""
        if use == "GradScaler":
            return (
                "torch's GradScaler skips a step on the ranks with infinite gradients only, but "
                "the model is divided over ranks, of which others would step: use "
                f"{self.scaler} instead"
            )
        if use == "clip_grad_value_" or (self.has_whole and len(params) == 1):
            return ""
        return (
            "torch's clip_grad_norm_ computes the norm of this rank's gradients only, but the "
            "model is divided over ranks, which would scale by different factors: call "
            f"{self.clip} instead"
        )


class _NotedEngine(NamedTuple):
    refusal: Refusal
    engine: weakref.ref[Any]


_NOTES: Any = WeakTensorKeyDictionary()  # parameter -> list of _NotedEngine


def note_incomplete(params: Iterable[torch.Tensor], refusal: Refusal, engine: object) -> None:
    """Ask `refusal` first before torch's functions use gradients of `params`.

    Args:
        params: Parameters.
        refusal: Function that says why a function of torch cannot be used.
        engine: Engine that noted them; the note ends with it.
    """
    note = _NotedEngine(refusal, weakref.ref(engine))
    for param in params:
        _NOTES[param] = [note, *_others(param, engine)]


def rename_calls(params: Iterable[torch.Tensor], calls: PartOfModel, engine: object) -> None:
    """Name other calls first, for the noted parameters of an engine that consists of others."""
    for param in params:
        if notes := _others(param, engine):
            _NOTES[param] = [_NotedEngine(calls.refusal, weakref.ref(engine)), *notes]


def forget_incomplete(params: Iterable[torch.Tensor], engine: object = None) -> None:
    """Allow torch's functions again, since all gradients are on this rank.

    Args:
        params: Parameters.
        engine: Engine that has noted them; None for all engines.
    """
    for param in params:
        if rest := [] if engine is None else _others(param, engine):
            _NOTES[param] = rest
        else:
            _NOTES.pop(param, None)


def _others(param: torch.Tensor, engine: object) -> list[_NotedEngine]:
    """Return the notes of other engines that still exist."""
    notes: list[_NotedEngine] = _NOTES.get(param, [])
    return [note for note in notes if (other := note.engine()) is not None and other is not engine]


def _check(params: Sequence[torch.Tensor], use: Use) -> None:
    if not len(_NOTES):
        return
    notes: dict[int, _NotedEngine] = {}
    for param in params:
        notes.update((id(note), note) for note in _others(param, None))
    for note in notes.values():
        if text := note.refusal(note.engine(), params, use):
            raise ConfigError(text)


def _check_scaler(scaler: object, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(scaler, AgreedGradScaler):
        groups = getattr(optimizer, "param_groups", ())
        _check([param for group in groups for param in group["params"]], "GradScaler")


before_clipping(_check)
before_unscaling(_check_scaler)
