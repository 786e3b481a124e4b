"""Comparison of the calls of a model with sharded layers over its ranks.

Each rank calls the model with the same batch, and computes the same loss. Otherwise sums over ranks
have terms of different batches, and parameters that are not sharded drift apart. So in some calls
ranks compare the first input and the losses among the outputs. If the first output is equal on all
ranks, and not a shard, they also compare the gradient that comes back to it. Other inputs and
outputs may be shards on purpose, such as caches of keys and values.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from braid.comm import Group
from braid.comm.autograd.nested import tensors_in
from braid.parallel.gradients.same_batches import SameBatches
from braid.parallel.tensor_parallel.slices import NotCopied
from braid.runtime.torch_internals import disable_dynamo
from braid.types import ranks_text

__all__ = ["compare_calls", "compare_no_more"]

COMPARED = "braid_compared"  # attribute of a model
NUMBERS = {torch.Tensor, nn.Parameter}  # other types may have no numbers
SAME_LOSS = "Compute the same loss, with the same targets, on all of these ranks"


def compare_calls(model: nn.Module, group: Group) -> None:
    """Compare inputs, losses and gradients of some calls of a model over a group."""
    calls = _ComparedCalls(group)
    model.__dict__[COMPARED] = [
        model.register_forward_pre_hook(calls.begins, with_kwargs=True),
        model.register_forward_hook(calls.ends),
    ]


def compare_no_more(model: nn.Module) -> None:
    """Remove the hooks of `compare_calls`, if there are any."""
    for handle in model.__dict__.pop(COMPARED, ()):
        handle.remove()


class _ComparedCalls(NotCopied):
    def __init__(self, group: Group) -> None:
        self._group = group
        self._comparison = SameBatches()
        self._compares = self._has_warned = False

    @disable_dynamo  # collectives cannot be part of a compiled graph
    def begins(self, _model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        first = list(islice(tensors_in((args, kwargs)), 1))
        # a call may be the capture of the model's graph, inside of another call
        self._compares = {type(x) for x in first} <= NUMBERS and self._comparison.is_due()
        if self._compares:
            self._comparison.require(self._group, "inputs", first)

    @disable_dynamo
    def ends(self, _model: nn.Module, _args: object, output: Any) -> None:
        if not self._compares:
            return
        self._compares = False
        outputs: list[Any] = list(tensors_in(output))
        losses = [x for x in outputs if not x.dim()]
        self._comparison.require(self._group, "losses", losses, SAME_LOSS)
        (others,) = self._comparison.differing(self._group, outputs[:1])
        for x in outputs[:1]:
            if x.requires_grad and not x.is_leaf and not others:
                x.register_hook(self._check_gradient)

    def _check_gradient(self, grad: torch.Tensor) -> None:
        (others,) = self._comparison.differing(self._group, grad)
        if others and not self._has_warned:
            self._has_warned = True
            text = (
                f"the gradients of the outputs on {ranks_text(others)} are not the gradients on "
                f"rank {self._group.ranks[0]}, although the outputs are equal. {SAME_LOSS}. Shown "
                "once"
            )
            warnings.warn(text, UserWarning, stacklevel=2)
