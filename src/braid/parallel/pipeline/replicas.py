"""Replicas of a pipeline: ranks that train the same stages on other samples.

Gradients of a stage are added over its replicas as soon as its last backward has ended, while other
stages of the pipeline still compute. Each replica multiplies its losses by its share of all
samples, so the sum is the gradient of the mean loss over all samples.

    pp=2, dp=2     rank 0  stage 0, samples of replica 0      rank 2  stage 1, replica 0
                   rank 1  stage 0, samples of replica 1      rank 3  stage 1, replica 1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from braid.comm import Group, StepsBy, Work
from braid.parallel.gradients import FlatBuffer
from braid.parallel.pipeline.stage import Stage

__all__ = ["Replicas"]


class Replicas:
    """Sums of the gradients of this rank's stages over its replicas.

    Args:
        stages: Stages of this rank, by number.
        group: Ranks that have the same stages, in the order of their samples; None without
            replicas.
        averages: Whether the caller averages gradients and losses over these ranks, after the step;
            then no sums are made here.
    """

    def __init__(
        self, stages: Mapping[int, Stage], group: Group | None, *, averages: bool = False
    ) -> None:
        self._group = group
        self.averages = averages
        holders: dict[nn.Parameter, list[int]] = defaultdict(list)
        for number, stage in stages.items():
            for layer in stage.layers:
                for param in layer.module.parameters():
                    # including frozen ones, which may be unfrozen later
                    if param.is_floating_point() and number not in holders[param]:
                        holders[param].append(number)
        alike: dict[object, list[nn.Parameter]] = defaultdict(list)
        for param, stage_numbers in holders.items():
            alike[tuple(stage_numbers), param.dtype, param.device].append(param)
        self._sums = (
            []
            if group is None
            else [_Sum(params, holders[params[0]], group) for params in alike.values()]
        )

    @property
    def number(self) -> int:
        """Number of this replica, in the order of their samples."""
        return 0 if self._group is None else self._group.rank

    @property
    def params(self) -> set[nn.Parameter]:
        """Parameters with gradients that are added over replicas."""
        return {param for grad_sum in self._sums for param in grad_sum.params}

    def weights(self, weight: float) -> list[float]:
        """Return the weights of all replicas, in order; a collective.

        Args:
            weight: Weight of this replica, such as its number of samples.

        Cost: an all_gather of 8 bytes.
        """
        if self._group is None:
            return [weight]
        return self._group.all_gather(torch.tensor([weight], dtype=torch.float64)).tolist()

    def total(self, weights: Sequence[float]) -> float:
        """Return the divisor of weights: their sum, or their mean if the caller averages."""
        return sum(weights) / (len(weights) if self.averages else 1)

    def begin(self) -> None:
        """Prepare for the gradients of a new step."""
        for grad_sum in self._sums:
            grad_sum.missing = set(grad_sum.stages)

    def launch(self, stage: int) -> None:
        """Start to add, over replicas, gradients that the stage's last gradient has completed."""
        for grad_sum in self._sums:
            if stage in grad_sum.missing:
                grad_sum.missing.discard(stage)
                if not grad_sum.missing:
                    grad_sum.start()

    def finish(self, stage: int | None = None) -> None:
        """Wait for the sums, and write them to `.grad`.

        Args:
            stage: Stage of the needed parameters; None for all.
        """
        for grad_sum in self._sums:
            if stage is None or stage in grad_sum.stages:
                grad_sum.finish()

    def sum_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return a number summed over replicas, unless the caller averages it; a collective."""
        if self._group is None or self.averages:
            return value
        return self._group.all_reduce(value)


class _Sum:
    """Parameters with gradients that are complete at the same time, and added in one operation."""

    def __init__(self, params: list[nn.Parameter], stages: list[int], group: Group) -> None:
        self.stages = stages
        self.missing: set[int] = set()
        self.params = params
        # one more element per parameter: the number of ranks with a gradient
        counts = torch.empty(len(params), dtype=params[0].dtype, device=params[0].device)
        self._flat = FlatBuffer.for_params([*params, counts], group, params[0].dtype)
        self._request = group.persistent("all_reduce", self._flat.tensor)
        self._work: Work | None = None

    def start(self) -> None:
        *views, counts = self._flat.views
        with torch.no_grad():
            for param, view in zip(self.params, views, strict=True):
                view.zero_() if param.grad is None else view.copy_(param.grad)
            counts.copy_(torch.tensor([float(p.grad is not None) for p in self.params]))
        self._work = self._request.start(steps_by=StepsBy.WAITER)

    def finish(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        *views, counts = self._flat.views
        for param, view, count in zip(self.params, views, counts.tolist(), strict=True):
            if count:
                param.grad = view.clone()
