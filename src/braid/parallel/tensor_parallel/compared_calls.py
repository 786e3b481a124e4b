"""Comparison of the calls of a model with sharded layers over its ranks.

Each rank calls the model with the same batch, and computes the same loss. With other inputs, or
other targets, parameters that are not sharded drift apart, and sums over ranks have terms of
different batches. So ranks compare the inputs of some calls and, if they have equal outputs, the
gradients that come back to the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from braid.comm import Group
from braid.comm.autograd.nested import tensors_in
from braid.parallel.gradients.incomplete import parts_in
from braid.parallel.gradients.same_batches import SameBatches
from braid.runtime.torch_internals import disable_dynamo

__all__ = ["compare_calls"]


def compare_calls(model: nn.Module, group: Group) -> None:
    """Compare the inputs of a model's calls, and the gradients of its outputs, over a group."""
    calls = _ComparedCalls(group)
    model.register_forward_pre_hook(calls.begins, with_kwargs=True)
    model.register_forward_hook(calls.ends)


class _ComparedCalls:
    def __init__(self, group: Group) -> None:
        self._group = group
        self._comparison = SameBatches()
        self._compares = False

    @disable_dynamo  # collectives cannot be part of a compiled graph
    def begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not parts_in(model):  # it is whole again
            return
        self._compares = self._comparison.is_due()
        if self._compares:
            self._comparison.require(self._group, "inputs", (args, kwargs))

    @disable_dynamo
    def ends(self, _model: nn.Module, _args: object, output: Any) -> None:
        if not self._compares:
            return
        self._compares = False
        (others,) = self._comparison.differing(self._group, output)
        trained: list[Any] = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if trained and not others:  # outputs may also be shards
            trained[0].register_hook(self._check_gradient)

    def _check_gradient(self, grad: torch.Tensor) -> None:
        self._comparison.require(self._group, "gradients of the outputs", grad)
