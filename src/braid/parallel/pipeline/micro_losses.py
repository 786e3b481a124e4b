"""Losses of micro-batches, weighed so that their sum is the mean loss of the whole batch.

Problem: the mean over a batch is a sum of the micro-batches' means with the right weights only. A
mean over tokens without padding needs the numbers of these tokens, not of rows. With other weights
the gradient is another one, without an error.

Idea: a micro-batch weighs its number of rows, or what the program's `loss_weight` returns for its
targets. In the first step, the graph of each loss shows whether it is a sum, and over how many
terms it is a mean; the program is warned if the weights do not fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from braid.comm.autograd.nested import tensors_in
from braid.errors import ConfigError
from braid.parallel.gradients.loss_weight import checked_weight
from braid.parallel.pipeline.cutting import check_target, checked_loss
from braid.parallel.pipeline.microbatches import scatter
from braid.parallel.pipeline.replicas import Replicas
from braid.runtime.torch_internals import is_sum, num_terms

__all__ = ["Loss", "LossWarnings", "LossWeight", "MicroLosses"]

Loss = Callable[[Any, Any], torch.Tensor]
LossWeight = Callable[[Any], float | torch.Tensor]

PENALTY = (
    "the loss uses all {} weights of this rank beside the output, like a penalty on weights, but "
    "cannot use the weights of other ranks of the pipeline: use weight_decay of the optimizer, or "
    "add the gradient of the penalty to .grad on each rank after pipeline.step"
)
SUM = (
    "the loss is a sum over a micro-batch, but losses of micro-batches are averaged, so the "
    "gradient is not the gradient of the sum over the batch: return a mean"
)
TERMS = (
    "the loss is a mean over targets that weigh {:g} a row in one micro-batch and {:g} in another "
    "one, but micro-batches are weighed by their rows, so the gradient is not the gradient of the "
    "mean over the batch: pass loss_weight=, a function of the targets that returns their weight, "
    "such as lambda target: (target != -100).sum() for targets with padding"
)

ZERO = torch.zeros(())


class LossWarnings:
    """Warns once of losses with which a step computes another gradient than the batch's.

    Args:
        params: Function that returns the parameters of this rank; None if no other rank has
            parameters of the model.
    """

    def __init__(self, params: Callable[[], Iterable[nn.Parameter]] | None) -> None:
        self._params = params
        self.is_first_step = True
        self._has_warned = False  # of terms
        self._before = -1.0  # weight of a row's targets in the last mean

    def end_step(self) -> None:
        """Stop checking sums and means after the first step."""
        self.is_first_step = False

    def look_at_params(self, loss: torch.Tensor, output: Any) -> None:
        """Warn if a loss uses all weights of this rank, and no weight of other ranks."""
        if self._params is None:
            return
        weights = {param for param in self._params() if param.requires_grad and param.dim() > 1}
        ends = {x.grad_fn for x in tensors_in(output)}
        if len(weights) < 2 or not ends:
            return
        nodes, used, seen = [loss.grad_fn], set(), set(ends)
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            used.add(getattr(node, "variable", None))
            nodes += [following for following, _ in node.next_functions]
        if weights <= used:
            self._params = None
            warnings.warn(PENALTY.format(len(weights)), UserWarning, stacklevel=2)

    def look_at_terms(self, loss: torch.Tensor, rows: int, replicas: Replicas | None) -> None:
        """Warn if a loss that is weighed by its rows is a sum, or another mean.

        Args:
            loss: Loss of a micro-batch.
            rows: Number of its rows.
            replicas: Replicas with which this loss is compared by a collective; None for no
                comparison.
        """
        terms = num_terms(loss)
        per_row = -1.0 if terms is None else terms / rows
        known = [] if replicas is None else replicas.weights(per_row)
        known = [weight for weight in (self._before, per_row, *known) if weight >= 0]
        self._before = per_row
        text = SUM if is_sum(loss) else ""
        # torch counts in the dtype of the loss
        if known and max(known) - min(known) > 4 * torch.finfo(loss.dtype).eps * max(known):
            text = TERMS.format(max(known), min(known))
        if text and not self._has_warned:
            self._has_warned = True
            warnings.warn(text, UserWarning, stacklevel=2)


class MicroLosses:
    """Function (output, number of a micro-batch) that returns a weighed loss.

    Args:
        loss: Loss of the program.
        loss_weight: Function that returns the weight of a micro-batch, from its targets; None for
            its rows.
        target: Targets of the batch.
        sizes: Rows of each micro-batch.
        replicas: Ranks with other samples.
        rows: Rows of all replicas.
        advice: Object that looks at the losses of a step; None in an evaluation.
    """

    def __init__(
        self,
        loss: Loss,
        loss_weight: LossWeight | None,
        target: Any,
        sizes: Sequence[int],
        *,
        replicas: Replicas,
        rows: Sequence[float],
        advice: LossWarnings | None,
    ) -> None:
        self._loss = loss
        self._loss_weight = loss_weight
        self._target = target
        self._sizes = sizes
        self._replicas = replicas
        self._weights: Sequence[float] = sizes
        self._total = replicas.total(rows)
        self._is_split = len(sizes) > 1 or len(rows) > 1
        self._advice = advice
        self._targets: list[Any] = []
        self._has_compared = False  # with replicas

    def __call__(self, output: Any, i: int) -> torch.Tensor:
        """Return the loss of a micro-batch, multiplied by its share of all weights."""
        if not self._targets:  # here, so that invalid targets are an error on all ranks
            self._begin()
        if not self._weights[i]:
            # A mean over nothing would not be a number. Zeros of any output have a graph, because
            # other ranks take part in its backward.
            parts = [x for x in tensors_in(output) if x.requires_grad]
            return sum((x.where(x.new_zeros((), dtype=torch.bool), 0).sum() for x in parts), ZERO)
        loss = self._loss(output, self._targets[i])
        value = checked_loss(loss)
        if self._advice is not None:
            if not i:
                self._advice.look_at_params(loss, output)
            if self._loss_weight is None and self._is_split and self._advice.is_first_step:
                replicas = None if self._has_compared else self._replicas
                self._has_compared = True
                self._advice.look_at_terms(loss, self._sizes[i], replicas)
        return value * (self._weights[i] / self._total)

    def _begin(self) -> None:
        """Split the targets, and compute the weights; a collective of replicas with weights."""
        check_target(self._target, sum(self._sizes))
        self._targets = scatter(self._target, list(self._sizes))
        if self._loss_weight is None:
            return
        self._weights = [checked_weight(self._loss_weight(target)) for target in self._targets]
        self._total = self._replicas.total(self._replicas.weights(sum(self._weights)))
        if not self._total:
            msg = "loss_weight returned 0 for all micro-batches: leave the batch out on all ranks"
            raise ConfigError(msg)
