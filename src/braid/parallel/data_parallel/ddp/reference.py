"""The same step in one process: the reference for every parallel run.

"Equal to one process" has an exact meaning here: one process, with the number of threads of a rank,
runs the n shards in the order of ranks, sums their gradients in that order and divides once. n
ranks compute the same, bit by bit. (One forward over the whole batch adds numbers in another order
and agrees only to a tolerance.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from braid.comm.tensors.reduction import combine

__all__ = ["accumulate"]


def accumulate(
    module: nn.Module, shard_losses: Sequence[Callable[[], torch.Tensor]]
) -> list[torch.Tensor]:
    """Compute in one process the gradients that `DistributedDataParallel` computes on n ranks.

    Buffers get the values that they have after the forward of the first shard.

    Args:
        module: Model; its `.grad` receives the averages.
        shard_losses: Functions that run the forward on a rank's shard and return the loss, in the
            order of ranks.

    Returns:
        The losses, detached.
    """
    params = [p for p in module.parameters() if p.requires_grad]
    before = _copies(module)
    after: dict[str, torch.Tensor] = {}
    gradients: list[list[torch.Tensor | None]] = []
    losses = []
    for number, shard_loss in enumerate(shard_losses):
        for param in params:
            param.grad = None
        if number:
            _restore(module, before)
        loss = shard_loss()
        after = after or _copies(module)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's signature is untyped
        losses.append(loss.detach())
        gradients.append([param.grad for param in params])
    _restore(module, after)
    for param, *column in zip(params, *gradients, strict=True):
        if all(grad is None for grad in column):
            param.grad = None
            continue
        filled = [torch.zeros_like(param) if grad is None else grad for grad in column]
        param.grad = torch.empty_like(param)
        combine(filled, param.grad, "avg", None)
    return losses


def _copies(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def _restore(module: nn.Module, copies: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in copies:
                buffer.copy_(copies[name])
