"""Sharding of transformers' Conv1D, a linear layer with its weight as [in, out].

The class is identified by name and attributes, since transformers need not be installed.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional

from braid.comm import Group
from braid.comm.autograd import (
    all_gather_forward_split_backward,
    all_reduce_forward_identity_backward,
)
from braid.parallel.tensor_parallel.linear import column_linear, slice_param
from braid.parallel.tensor_parallel.slices import Slicing

__all__ = ["divide_transposed", "is_transposed"]


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with its weight as [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def divide_transposed(module: nn.Module, kind: str, blocks: int, group: Group) -> None:
    """Shard a layer with weight [in, out] in place.

    Args:
        module: The layer.
        kind: `column` or `head` to shard outputs (`head` also gathers them), `row` for inputs.
        blocks: Number of packed matrices in the weight, such as 3 for query, key and value.
        group: Ranks that share the layer.
    """
    by_outputs = kind in {"column", "head"}
    module.__class__ = _TransposedColumn if by_outputs else _TransposedRow
    layer = cast("_TransposedColumn", module)
    layer.group, layer.gather_output = group, kind == "head"
    slice_param(layer.weight, Slicing(1 if by_outputs else 0, blocks), group)
    if by_outputs:
        slice_param(layer.bias, Slicing(0, blocks), group)
    layer.nf = layer.weight.shape[1]


class _TransposedColumn(nn.Module):
    group: Group
    gather_output: bool
    weight: nn.Parameter
    bias: nn.Parameter
    nf: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = column_linear(self.group, x, self.weight.t(), self.bias)
        if not self.gather_output:
            return y
        return all_gather_forward_split_backward(self.group, y, dim=y.dim() - 1)


class _TransposedRow(nn.Module):
    group: Group
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        term = functional.linear(x, self.weight.t())
        return all_reduce_forward_identity_backward(self.group, term) + self.bias
