"""Filling of gradients that exist on some ranks only, before they are added or averaged.

If no rank has used a parameter, its gradient stays None, as in one process: its optimizer skips it,
whereas zeros would change it by weight decay and momentum. If any rank has a gradient, the others
add zeros.
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
    """Return the parameters with a gradient on any rank, and the local gradients; a collective.

    Missing local gradients are filled with zeros.

    Args:
        params: Parameters, the same ones on all ranks.
        groups: Ranks that sum gradients; several groups for several axes.

    Cost: one all_reduce of a byte per parameter per group.
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
