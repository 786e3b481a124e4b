"""Comparison of the settings of optimizer steps over ranks, during training.

Problem: a program that calls `scheduler.step(loss)` with the loss of its rank gets another learning
rate on each rank, perhaps after hours. The weights of replicas then drift apart, or the shards of
one model follow different rates.

Idea: an engine notes the settings of each optimizer that steps on its parameters. Every `EVERY`
averagings, ranks compare the settings of all steps since the last comparison, by one digest.

    averaging   n   | step |  n + 1  | step |  n + 2   ...   compare the settings of both steps
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from braid.comm import Group
from braid.parallel.gradients.hashing import first_difference

__all__ = ["ADVICE", "EVERY", "StepSettings", "settings_of"]

EVERY = 10  # averagings; a comparison costs one small message
MOST_STEPS = 64  # different settings between two averagings that are kept
ADVICE = (
    "Step schedulers with the same numbers on each rank: average a loss over ranks before "
    "scheduler.step(loss), and change settings and skip steps on all ranks alike"
)
Settings: TypeAlias = "tuple[tuple[tuple[str, Any], ...], ...]"  # of each parameter group
_ENGINES: dict[int, weakref.ref[StepSettings]] = {}


class StepSettings:
    """Settings of the optimizer steps on the parameters of an engine.

    Args:
        params: The parameters that optimizers step on.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._ids = frozenset(map(id, params))
        self._steps: dict[Settings, None] = {}  # since the last averaging, in order
        self._intervals: list[tuple[int, tuple[Settings, ...]]] = []  # between averagings
        self._num_averagings = 0
        self._was_complete = True
        self._has_warned = False
        _ENGINES[id(self)] = weakref.ref(self)
        weakref.finalize(self, _ENGINES.pop, id(self), None).atexit = False

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the settings of an optimizer that is about to step, if it has the parameters."""
        groups = optimizer.param_groups
        if self._ids.isdisjoint(id(param) for group in groups for param in group["params"]):
            return
        self._steps[settings_of(optimizer)] = None
        if len(self._steps) > MOST_STEPS:
            del self._steps[next(iter(self._steps))]

    def averaged(self, groups: Iterable[Group], *, is_complete: bool = True) -> None:
        """Note the end of an averaging of gradients; called on all ranks after each averaging.

        Args:
            groups: Groups of ranks that averaged.
            is_complete: Whether all ranks had gradients. Steps before and after are not compared
                otherwise, since a rank that has no more input does not step.

        Warns once, on all ranks, if settings differ; the warning has the first ones.

        Cost: in every `EVERY`-th call, one all_gather of 8 bytes for each group.
        """
        steps, self._steps = tuple(self._steps), {}
        if is_complete and self._was_complete:
            self._intervals.append((self._num_averagings, steps))
        self._was_complete = is_complete
        self._num_averagings += 1
        if self._num_averagings % EVERY:
            return
        lines, self._intervals = [*_lines(self._intervals)], []
        texts = [first_difference(group, lines) for group in groups]  # collectives
        if (first := next(filter(None, texts), "")) and not self._has_warned:
            self._has_warned = True
            text = (
                f"optimizers step with different settings on ranks, first:\n{first}\n{ADVICE}. "
                "Shown once"
            )
            warnings.warn(text, UserWarning, stacklevel=2)


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """Return the settings of each parameter group that can be compared over ranks."""
    return tuple(
        tuple(
            (name, value)
            for name, setting in settings.items()
            if (value := _value_of(setting)) is not None
        )
        for settings in optimizer.param_groups
    )


def _value_of(setting: Any) -> Any:
    """Return a number or a pair of numbers that can be compared; None for other settings.

    Tensors of a GPU are not compared, since reading them would wait for the GPU; nor are texts,
    which may be the name of this rank's device.
    """
    if isinstance(setting, int | float):
        return setting
    if isinstance(setting, torch.Tensor):
        return setting.item() if setting.is_cpu and setting.numel() == 1 else None
    is_pair = isinstance(setting, tuple) and all(isinstance(x, int | float) for x in setting)
    return setting if is_pair else None


def _lines(intervals: Iterable[tuple[int, tuple[Settings, ...]]]) -> Iterator[str]:
    """Yield a line for each parameter group in each step."""
    for number, steps in intervals:
        for settings in steps:
            for group, values in enumerate(settings):
                yield f"step {number}, parameter group {group}: {dict(values)}"
        if not steps:
            yield f"step {number}: none"


def _note(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    for reference in _ENGINES.copy().values():  # the garbage collector may remove some
        engine = reference()
        if engine is not None:
            engine.note(optimizer)


register_optimizer_step_pre_hook(_note)
