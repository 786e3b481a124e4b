"""Averages the gradients of several learners, so that they train as one learner.

    learner 0: unrolls of its actors -> gradients ─┐
    learner 1: unrolls of its actors -> gradients ─┴─> mean over all steps -> the same update

Each learner weights its gradients by the number of environment steps in its batch. The mean is
the gradient of the joined batch, and all learners have the same weights at all times. A learner
that ends takes part once more, with no steps, and all learners end.

A parameter that no learner has a gradient for, such as a frozen one, keeps None: zeros would
change it by weight decay.

Cost: in each update an all-reduce of two numbers, one of a byte per parameter, and one of the
gradients of each dtype.

Source: L. Espeholt et al., ICML 2018, section 3 (synchronous learners).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from braid.comm import Group
from braid.parallel.gradients import fill_missing_gradients

__all__ = ["GradientAverage"]


class GradientAverage:
    """Average of gradients over the learners of a group, which begin with equal weights.

    Args:
        group: Group of the learners' processes.
        module: Module of this learner; gets the weights of the group's first learner.
    """

    def __init__(self, group: Group, module: nn.Module) -> None:
        self._group = group
        self._params: Sequence[nn.Parameter] = [*module.parameters()]
        with torch.no_grad():
            for tensor in module.state_dict().values():
                group.broadcast(tensor)

    def average(self, num_steps: int) -> bool:
        """Replace the gradients by their mean over the steps of all learners.

        Args:
            num_steps: Number of environment steps that the gradients are a mean of.

        Returns:
            Whether training goes on; False if a learner has ended, and the gradients are unchanged.
        """
        total = self._total(num_steps)
        if total is None:
            return False
        same_dtype: dict[torch.dtype, list[tuple[nn.Parameter, torch.Tensor]]] = defaultdict(list)
        for param, grad in fill_missing_gradients(self._params, [self._group]):
            same_dtype[grad.dtype].append((param, grad))
        for pairs in same_dtype.values():
            flat = torch.cat([grad.flatten() for _, grad in pairs]).mul_(num_steps / total)
            mean = self._group.all_reduce(flat)
            parts = torch.split_with_sizes(mean, [grad.numel() for _, grad in pairs])
            for (param, _), part in zip(pairs, parts, strict=True):
                param.grad = part.view_as(param)
        return True

    def end(self) -> None:
        """Tell the other learners, which are in `average` or in `end`, that training is over."""
        self._total(None)

    def _total(self, num_steps: int | None) -> int | None:
        """Return the number of steps of all learners; None if one has ended, with None steps."""
        counts = torch.tensor([num_steps or 0, num_steps is None])
        num_all, num_ended = self._group.all_reduce(counts).tolist()
        return None if num_ended else int(num_all)
