"""Averaging of models: each rank trains alone, and parameters are averaged in some steps.

Problem: averaging gradients costs one exchange per step, also over a slow network.

Idea: ranks take `period` steps alone before they average their models. This makes gradients
noisier, which hurts in the beginning and helps later. So training begins by averaging gradients
(`warmup_steps`, and `PostLocalSGDHook` with the same number) and then averages models.

    for x, y in batches:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())

Source: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020
(post-local SGD, and its hierarchical form). Names and step counts follow
`torch.distributed.algorithms.model_averaging`. All parameters that require a gradient are averaged,
also parameters without a gradient in this step.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.data_parallel.finite import FiniteCheck
from braid.parallel.data_parallel.flat_params import FlatParams, Params, mean, parameters_in
from braid.parallel.data_parallel.step_counts import is_whole
from braid.parallel.gradients import ParamTable
from braid.parallel.gradients.process_groups import group_of

__all__ = ["HierarchicalModelAverager", "ModelAverager", "PeriodicModelAverager"]

EVERY_STEP = (
    "models are averaged in every step: averaging gradients (DistributedDataParallel) "
    "sends as much and overlaps with backward"
)


class ModelAverager(ABC):
    """Base class of objects that average models in some steps.

    Args:
        process_group: Group, as for DistributedDataParallel.
        warmup_steps: Number of steps before the first averaging.
        nonfinite: Reaction to NaN and infinity in parameters: "ignore"; "warn", once; or "raise" on
            all ranks, before parameters are replaced.

    Attributes:
        process_group: Group of braid.
        step: Number of calls so far.

    Raises:
        ConfigError: No group exists, or a number of steps is negative or not an integer.
    """

    def __init__(
        self, process_group: Any = None, *, warmup_steps: int = 0, nonfinite: str = "warn"
    ) -> None:
        if not is_whole(warmup_steps, 0):
            msg = f"warmup_steps must be an integer of at least 0, got {warmup_steps!r}"
            raise ConfigError(msg)
        self.process_group = group_of(process_group)
        self.warmup_steps = warmup_steps
        self.step = 0
        self._check = FiniteCheck(nonfinite, type(self).__name__)
        self._flat: FlatParams | None = None
        self._all_averaged = False

    def average_parameters(self, params: Params) -> None:
        """Average the parameters over ranks if this is one of the steps with an averaging.

        Call after every step of the optimizer, on all ranks. In some steps this is a collective.

        Args:
            params: Parameters of a model or parameter groups of an optimizer; the same ones every
                time.

        Raises:
            MismatchError: Parameters, their order or the averager's arguments differ between ranks;
                raised in the first averaging.
            NonFiniteError: Parameters are NaN or infinite on a rank, and `nonfinite` is "raise";
                the step is counted.
        """
        group = self._group_now() if self.step >= self.warmup_steps else None
        step = self.step
        self.step += 1
        self._all_averaged = False
        if group is not None:
            required = parameters_in(params)
            if self._flat is None or not self._flat.holds(required):
                self._flat = FlatParams.agreed(required, self.process_group, **self._arguments())
            mean(self._flat, group, self._check, step)
            self._all_averaged = group is self.process_group

    def has_just_averaged(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a parameter that the last call has averaged over all ranks."""
        return (
            self._all_averaged
            and self._flat is not None
            and any(tensor is param for param in self._flat.params)
        )

    def _arguments(self) -> dict[str, object]:
        """Return the arguments that must be the same on all ranks.

        With different arguments, models of different steps would be averaged.
        """
        return {"warmup_steps": int(self.warmup_steps), "nonfinite": self._check.nonfinite}

    @abstractmethod
    def _group_now(self) -> Group | None:
        """Return the group that averages in this step; None for no averaging."""


class PeriodicModelAverager(ModelAverager):
    """Averager over all ranks every `period` steps, first in step `warmup_steps`.

    Args:
        period: Number of steps between two averagings.
        warmup_steps: Number of steps before the first averaging.
        process_group: Group, as for DistributedDataParallel.
        nonfinite: Reaction to NaN and infinity; see `ModelAverager`.

    Raises:
        ConfigError: A number is out of range.

    Cost: 2 (n-1)/n l / period bytes per step and rank.
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: Any = None,
        *,
        nonfinite: str = "warn",
    ) -> None:
        super().__init__(process_group, warmup_steps=warmup_steps, nonfinite=nonfinite)
        if not is_whole(period, 1):
            msg = f"period must be an integer of at least 1 (steps), got {period!r}"
            raise ConfigError(msg)
        if period == 1:
            warnings.warn(EVERY_STEP, UserWarning, stacklevel=2)
        self.period = period

    def _arguments(self) -> dict[str, object]:
        return {"period": int(self.period), **super()._arguments()}

    def _group_now(self) -> Group | None:
        due = (self.step - self.warmup_steps) % self.period == 0
        return self.process_group if due else None


class HierarchicalModelAverager(ModelAverager):
    """Averager that averages often in small groups and rarely in large ones.

    With {2: 4, 8: 16}: over each 4 consecutive ranks in every second step, and over all 16 in every
    eighth. If several periods divide a step, the longest is used.

    Args:
        period_group_size_dict: Period in steps -> number of ranks per group; both grow, and the
            last group has all ranks.
        warmup_steps: Number of steps before the first averaging.
        process_group: Group, as for DistributedDataParallel.
        nonfinite: Reaction to NaN and infinity; see `ModelAverager`.

    Raises:
        ConfigError: Periods or sizes are not a hierarchy.
        MismatchError: Periods, sizes or warm-up steps differ between ranks.

    Cost: a separate group for each size but the last; an all_gather of 8 bytes to create it.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: Any = None,
        *,
        nonfinite: str = "warn",
    ) -> None:
        super().__init__(process_group, warmup_steps=warmup_steps, nonfinite=nonfinite)
        sizes = dict(period_group_size_dict or {})
        _check_hierarchy(sizes, self.process_group.size)
        if max(sizes) == 1:
            warnings.warn(EVERY_STEP, UserWarning, stacklevel=2)
        self._sizes = sizes
        ParamTable.named([]).compare(self.process_group, self._arguments())  # before the split
        self.period_process_group_dict: dict[int, Group] = {}
        for period, size in sizes.items():
            whole = size == self.process_group.size
            group = self.process_group if whole else self._part(size)
            self.period_process_group_dict[period] = group

    def close(self) -> None:
        """Close the groups created by this averager."""
        for group in self.period_process_group_dict.values():
            if group is not self.process_group:
                group.close()

    def _arguments(self) -> dict[str, object]:
        sizes = {int(period): int(size) for period, size in self._sizes.items()}
        return {"period_group_size_dict": sizes, **super()._arguments()}

    def _part(self, size: int) -> Group:
        group = self.process_group.split(self.process_group.rank // size)
        assert group is not None
        return group

    def _group_now(self) -> Group | None:
        periods = [p for p in self.period_process_group_dict if self.step % p == 0]
        return self.period_process_group_dict[max(periods)] if periods else None


def _check_hierarchy(sizes: Mapping[int, int], total: int) -> None:
    """Raise if the sizes are not a hierarchy.

    Raises:
        ConfigError: The sizes do not fit; the message shows an example that does.
    """
    levels = list(sizes.items())
    whole = all(is_whole(number, 1) for level in levels for number in level)
    grows = whole and all(a < c and b < d and d % b == 0 for (a, b), (c, d) in pairwise(levels))
    if not levels or not grows or levels[-1][1] != total:
        msg = (
            f"period_group_size_dict={dict(sizes)} is not a hierarchy: periods from 1 and group "
            "sizes must be integers that grow, each size must divide the next, and the last "
            f"size must be {total}, the size of the group, as in {_example(total)}"
        )
        raise ConfigError(msg)


def _example(total: int) -> dict[int, int]:
    part = max((size for size in range(2, total) if total % size == 0), default=None)
    return {4: total} if part is None else {4: part, 16: total}
