"""Checks that the shares of a batch make up the whole batch.

Problem: a proof compares N ranks with one process that runs the same shares. If the shares are
wrong, such as `x[rank:]` for `x[rank::size]`, both runs are wrong alike, and every bit is equal.

Idea: `loss(model, 0, 1, step)` is the loss of the whole batch, from the same function of the user.
For a mean over samples in equal shares, the mean of the shares' losses is the same number, up to
rounding. Dropout and batch statistics would differ for good reasons, so the model is compared in
evaluation mode.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import torch
from torch import nn

from braid.prove.task import Task

__all__ = ["ShareGap", "share_gap"]

# relative; the rounding of float32 sums of a million samples stays below, a wrong share above
TOLERANCE = 1e-3


class ShareGap(NamedTuple):
    """Shares whose mean is not the loss of the whole batch.

    Attributes:
        step: Step (from 1) at which both were computed.
        mean: Mean of the losses of the shares, as text.
        whole: Loss of the whole batch, as text.
        losses: Loss of each share, as text.
    """

    step: int
    mean: str
    whole: str
    losses: tuple[str, ...]

    def __str__(self) -> str:
        shares = ", ".join(self.losses[:8]) + (", ..." if len(self.losses) > 8 else "")
        return (
            f"in step {self.step} the mean of the shares' losses is {self.mean} ({shares}), and "
            f"loss(model, 0, 1, step) of the whole batch is {self.whole}"
        )


def share_gap(task: Task, model: nn.Module, size: int, step: int) -> ShareGap | None:
    """Compare the mean of the shares' losses with the loss of the whole batch.

    Args:
        task: Task whose loss is computed.
        model: Model; a copy in evaluation mode is used.
        size: Number of shares.
        step: Step (from 0).

    Returns:
        The difference; None if there is none, or the model cannot be evaluated.
    """
    evaluated = copy.deepcopy(model).eval()
    try:
        with torch.no_grad():
            losses = [_loss(task, evaluated, rank, size, step) for rank in range(size)]
            whole = _loss(task, evaluated, 0, 1, step)
    except Exception:  # noqa: BLE001 - models may have no loss in evaluation mode
        return None
    mean = math.fsum(losses) / size
    scale = max(abs(whole), math.fsum(map(abs, losses)) / size)
    if not math.isfinite(scale) or abs(mean - whole) <= TOLERANCE * scale:
        return None
    return ShareGap(step + 1, f"{mean:.6g}", f"{whole:.6g}", tuple(f"{x:.6g}" for x in losses))


def _loss(task: Task, model: nn.Module, rank: int, size: int, step: int) -> float:
    torch.manual_seed(step)
    return task.loss(model, rank, size, step).item()
