"""Gradients that some ranks have and others lack, before they are added or averaged.

A parameter that no rank has used keeps the gradient None, as in one process: its optimizer leaves
it and its state as they are, while zeros would let weight decay and momentum move it. Where some
rank has a gradient, the others add zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from braid.comm import Group

__all__ = ["fill_missing_gradients"]


def fill_missing_gradients(
    params: Sequence[nn.Parameter], groups: Sequence[Group]
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Return the parameters that some rank has a gradient of, with the gradient here; a collective.

    Args:
        params: Parameters, the same ones on all ranks.
        groups: Ranks whose gradients belong together; several groups if along several axes.

    Cost: one all_reduce of a byte per parameter for each group.
    """
    if not params:
        return []
    flags = torch.tensor(
        [param.grad is not None for param in params], dtype=torch.uint8, device=params[0].device
    )
    for group in groups:
        flags = group.all_reduce(flags, op="max")
    pairs = []
    for param, some in zip(params, flags.tolist(), strict=True):
        if some:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            pairs.append((param, param.grad))
    return pairs
