"""The mean of a loss over a whole sequence of which each rank has some positions.

A rank's own mean is not enough where positions are left out, such as padding: ranks then have
different numbers of them. So sums and counts are added over ranks.
"""

from __future__ import annotations

import torch

from braid.comm import Group
from braid.comm.autograd import all_reduce
from braid.errors import ConfigError

__all__ = ["mean_over_sequence", "shifted_labels"]


def mean_over_sequence(
    group: Group, losses: torch.Tensor, included: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean loss of all ranks' positions, on every rank.

    Args:
        group: Ranks that share the sequences.
        losses: Loss of each of this rank's positions.
        included: Whether a position has a loss, such as `labels != -100`; all of them when None.

    Shape:
        losses and included: any shape, the same for both. Result: zero-dim.

    Backward: gradients of parameters are those of n times the loss, in terms: average them over the
    ranks, as DistributedDataParallel does.

    Raises:
        ConfigError: Shapes differ, or no rank has a position with a loss.

    Cost: an all_reduce of 16 bytes forward and backward.
    """
    if included is not None and included.shape != losses.shape:
        msg = (
            f"losses of shape {list(losses.shape)} and included of shape {list(included.shape)} "
            "must have one shape"
        )
        raise ConfigError(msg)
    own = losses if included is None else losses.masked_fill(~included, 0)
    count = losses.numel() if included is None else included.sum()
    numbers = torch.stack([own.sum().double(), torch.as_tensor(count, device=own.device).double()])
    total, num = all_reduce(group, numbers).unbind()
    if not num.item():
        msg = "no rank has a position with a loss: all of them are left out"
        raise ConfigError(msg)
    return (total / num.detach()).to(losses.dtype)


def shifted_labels(labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Return the label that follows each position: shift whole sequences, before they are cut.

    Args:
        labels: Labels of whole sequences, whose dim 1 is that of positions.
        ignore_index: Label of the last position, which nothing follows.
    """
    behind = torch.full_like(labels[:, :1], ignore_index)
    return torch.cat([labels[:, 1:], behind], 1)
