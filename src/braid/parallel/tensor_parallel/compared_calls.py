"""Comparison of the calls of a model with sharded layers over its ranks.

Each rank calls the model with the same batch, draws the same random numbers for values that are not
sharded, and computes the same loss. Otherwise sums over ranks have terms of different batches or of
different dropout masks, and parameters that are not sharded drift apart. So ranks compare the
inputs and outputs of some calls, and the gradients that come back to the outputs.
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

SAME_NUMBERS = (
    "Layers such as dropout must draw the same random numbers on all of these ranks: call "
    "torch.manual_seed with one number on them after the model is made"
)
NUMBERS = {torch.Tensor, nn.Parameter}  # other types may have no numbers
SAME_LOSS = "Compute the same loss, with the same targets, on all of these ranks"


def compare_calls(model: nn.Module, group: Group, *, gathers: bool) -> None:
    """Compare inputs, outputs and gradients of a model's calls over a group.

    Args:
        model: Model with sharded layers.
        group: Ranks that share the model.
        gathers: Whether all outputs are whole on each rank; else only losses are.
    """
    calls = _ComparedCalls(group, gathers=gathers)
    model.register_forward_pre_hook(calls.begins, with_kwargs=True)
    model.register_forward_hook(calls.ends)


class _ComparedCalls:
    def __init__(self, group: Group, *, gathers: bool) -> None:
        self._group, self._gathers = group, gathers
        self._comparison = SameBatches()
        self._compares = False

    @disable_dynamo  # collectives cannot be part of a compiled graph
    def begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        kinds = {type(tensor) for tensor in tensors_in((args, kwargs))}
        # the model may be whole again, and a call may be the capture of its graph in another one
        self._compares = kinds <= NUMBERS and bool(parts_in(model)) and self._comparison.is_due()
        if self._compares:
            self._comparison.require(self._group, "inputs", (args, kwargs))

    @disable_dynamo
    def ends(self, _model: nn.Module, _args: object, output: Any) -> None:
        if not self._compares:
            return
        self._compares = False
        whole: list[Any] = [x for x in tensors_in(output) if self._gathers or not x.dim()]
        self._comparison.require(self._group, "outputs", whole, SAME_NUMBERS)
        for tensor in [x for x in whole if x.requires_grad][:1]:
            tensor.register_hook(self._check_gradient)

    def _check_gradient(self, grad: torch.Tensor) -> None:
        self._comparison.require(self._group, "gradients of the outputs", grad, SAME_LOSS)
