"""Checks that the shares of a batch make up the whole batch.

Problem: a proof compares N ranks with one process that runs the same shares. If the shares are
wrong, such as `x[rank:]` for `x[rank::size]`, both runs compute the same wrong result.

Idea: `loss(model, 0, 1, step)` is the loss of the whole batch, from the same user function.
If the loss is a mean over samples, the mean of the shares' losses is the same number, up to
rounding. The mean uses the weights that shares set with `model.set_loss_weight`. Dropout and batch
statistics would differ without an error, so the model is compared in evaluation mode.

If every share is the whole batch, the mean is right as well. The inputs of the model reveal this.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from braid.comm.autograd.nested import tensors_in
from braid.train.prove.task import Task

__all__ = ["CHECKED_STEPS", "ShareCheck", "ShareGap", "check_shares", "noting_weights"]

CHECKED_STEPS = 2  # number of first steps with a check; each check costs size + 1 forwards
# relative; rounding of float32 sums of a million samples is smaller, a wrong share is larger
TOLERANCE = 1e-3
WEIGHT = "set_loss_weight"


class ShareGap(NamedTuple):
    """A step in which the mean loss of the shares is not the loss of the whole batch.

    Attributes:
        step: Step (from 1).
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
            f"in step {self.step} the mean of the shares' losses is {self.mean} ({shares}), but "
            f"loss(model, 0, 1, step) of the whole batch is {self.whole}"
        )


class ShareCheck(NamedTuple):
    """Result of comparing the shares of one step with the whole batch.

    Attributes:
        gap: Difference of the mean of the shares' losses from the loss of the whole batch; None if
            there is none.
        are_whole: Whether every share is the whole batch: the same inputs, and the same loss.
    """

    gap: ShareGap | None = None
    are_whole: bool = False


class _ShareRun(NamedTuple):
    """Evaluation of one share: its loss and weight, and the input tensors of the model."""

    loss: float
    weight: float | None
    inputs: tuple[torch.Tensor, ...]


def check_shares(task: Task, model: nn.Module, size: int, step: int) -> ShareCheck:
    """Compare the shares of a step with the whole batch.

    Args:
        task: Task with the loss function.
        model: Model; a copy in evaluation mode is used.
        size: Number of shares.
        step: Step (from 0).

    Returns:
        The comparison; without a difference if the model cannot be evaluated.
    """
    evaluated = copy.deepcopy(model).eval()
    try:
        with torch.no_grad():
            shares = [_run(task, evaluated, rank, size, step) for rank in range(size)]
            whole = _run(task, evaluated, 0, 1, step)
    except Exception:  # noqa: BLE001 - a model may raise in evaluation mode
        return ShareCheck()
    return ShareCheck(_gap(shares, whole.loss, step), _are_whole(shares, whole))


@contextlib.contextmanager
def noting_weights(model: nn.Module, note: Callable[[float | None], None]) -> Iterator[None]:
    """Add the method `set_loss_weight` of `DistributedDataParallel` to a model temporarily.

    A model that already has the method is not changed.

    Args:
        model: The model.
        note: Function that the method calls with each weight.
    """
    if hasattr(model, WEIGHT):
        yield
        return
    setattr(model, WEIGHT, note)
    try:
        yield
    finally:
        delattr(model, WEIGHT)


def _gap(shares: list[_ShareRun], whole: float, step: int) -> ShareGap | None:
    losses = [share.loss for share in shares]
    weights = [1.0 if share.weight is None else share.weight for share in shares]
    total = math.fsum(weights)
    if not total > 0:
        return None
    mean = math.fsum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / total
    scale = max(abs(whole), math.fsum(map(abs, losses)) / len(losses))
    if not math.isfinite(scale) or abs(mean - whole) <= TOLERANCE * scale:
        return None
    return ShareGap(step + 1, f"{mean:.6g}", f"{whole:.6g}", tuple(f"{x:.6g}" for x in losses))


def _are_whole(shares: list[_ShareRun], whole: _ShareRun) -> bool:
    return (
        len(shares) > 1
        and bool(whole.inputs)
        and all(
            share.loss == whole.loss
            and len(share.inputs) == len(whole.inputs)
            and all(map(torch.equal, share.inputs, whole.inputs))
            for share in shares
        )
    )


def _run(task: Task, model: nn.Module, rank: int, size: int, step: int) -> _ShareRun:
    weights: list[float | None] = [None]
    inputs: list[torch.Tensor] = []

    def note_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.extend(tensors_in([*args, *kwargs.values()]))

    handle = model.register_forward_pre_hook(note_inputs, with_kwargs=True)
    try:
        with noting_weights(model, weights.append):
            torch.manual_seed(step)
            loss = task.loss(model, rank, size, step).item()
    finally:
        handle.remove()
    weight = weights[-1]
    return _ShareRun(loss, None if weight is None else float(weight), tuple(inputs))
