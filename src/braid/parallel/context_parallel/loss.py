"""Mean of a loss over a whole sequence that is sharded over ranks.

The mean per rank is not enough if positions are ignored, such as padding: ranks then have different
numbers of positions. So sums and counts are added over ranks.
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
        included: Whether a position has a loss, such as `labels != -100`; None for all positions.

    Shape:
        losses and included: any shape, the same for both. Result: zero-dim.

    Backward: gradients of parameters are this rank's terms of n times the gradient of the loss:
    average them over ranks, as DistributedDataParallel does.

    Raises:
        ConfigError: Shapes differ, or all positions of all ranks are ignored.

    Cost: an all_reduce of 16 bytes forward and backward.
    """
    if included is not None and included.shape != losses.shape:
        msg = (
            f"losses of shape {list(losses.shape)} and included of shape {list(included.shape)} "
            "must have the same shape: pass one boolean per loss"
        )
        raise ConfigError(msg)
    included_losses = losses if included is None else losses.masked_fill(~included, 0)
    count = losses.numel() if included is None else included.sum()
    numbers = torch.stack(
        [
            included_losses.sum().double(),
            torch.as_tensor(count, device=included_losses.device).double(),
        ]
    )
    total, num = all_reduce(group, numbers).unbind()
    if not num.item():
        msg = (
            "all positions of all ranks are ignored, so the mean loss is undefined: leave this "
            "batch out"
        )
        raise ConfigError(msg)
    return (total / num.detach()).to(losses.dtype)


def shifted_labels(labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Return the label that follows each position; use it before sequences are split.

    Args:
        labels: Labels of whole sequences, with positions as dim 1.
        ignore_index: Label of the last position, which has no successor.
    """
    behind = torch.full_like(labels[:, :1], ignore_index)
    return torch.cat([labels[:, 1:], behind], 1)
