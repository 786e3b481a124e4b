"""Averages buffers that differ between ranks, such as batch norm statistics, for a checkpoint.

Problem: batch normalization on each rank follows the rank's own samples. A checkpoint has one value
for each buffer, and the statistics of one rank cover its samples only.

Idea: running means and variances that differ are averaged over ranks. The averaged mean is the mean
of all samples. The averaged variance lacks the variance of the means over ranks, as with any
average of local statistics. Other buffers have no such rule: the first rank's are stored, and a
warning names them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from braid.checkpoint.training_state import kept_buffers
from braid.comm import Group
from braid.runtime.tensor_buffers import checksum
from braid.runtime.torch_internals import NormBase
from braid.types import first_few

__all__ = ["agreed_buffers"]


def agreed_buffers(model: nn.Module, groups: Sequence[Group]) -> dict[str, torch.Tensor]:
    """Return the persistent buffers with equal values on all ranks; a collective.

    Buffers that are equal on all ranks are returned unchanged. The model is not changed.

    Args:
        model: Model with the same buffers on all ranks, up to values.
        groups: Ranks that train the model; one group per mesh axis.

    Cost: two all_reduces of 8 bytes per buffer, and one of each running statistic that differs.
    """
    originals = kept_buffers(model)
    buffers = {name: buffer.detach() for name, buffer in originals.items()}
    if not buffers:
        return buffers
    sums = torch.tensor(list(map(checksum, buffers.values())))
    low, high = sums.clone(), sums.clone()
    for group in groups:
        low, high = group.all_reduce(low, "min"), group.all_reduce(high, "max")
    statistics = {
        id(x)
        for module in model.modules()
        if isinstance(module, NormBase)
        for x in (module.running_mean, module.running_var)
    }
    unknown = []
    for (name, buffer), differs in zip(list(buffers.items()), (low != high).tolist(), strict=True):
        if not differs:
            continue
        if id(originals[name]) in statistics:
            wide = buffer.double()
            for group in groups:
                wide = group.all_reduce(wide, "avg")
            buffers[name] = wide.to(buffer.dtype)
        else:
            unknown.append(name)
            buffers[name] = buffer.clone()
            for group in groups:
                group.broadcast(buffers[name], 0)
    if unknown:
        warnings.warn(
            f"buffers {first_few(unknown)} differ between ranks: a checkpoint and a gathered "
            "state dict contain the values of the first rank. Make the buffers equal before you "
            "save, or compute them from all ranks",
            UserWarning,
            stacklevel=2,
        )
    return buffers
