"""Order of a tensor's dims in memory, which messages preserve.

Kernels depend on it: a convolution of channels_last images may differ in the last bits from one of
row-major images. So a tensor without gaps is sent in its memory order, and is received with the
same strides. Views with gaps or overlaps are sent in row-major order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["as_in_memory", "in_order_of", "order_of", "restored"]


def order_of(x: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dims from the largest stride to the smallest; None for row-major order.

    Tensors with gaps or overlaps also return None.
    """
    if x.is_contiguous():
        return None
    strides = x.stride()
    order = tuple(sorted(range(x.dim()), key=lambda dim: -strides[dim]))
    return order if x.permute(order).is_contiguous() else None


def as_in_memory(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous view of a tensor's memory, or a row-major copy if it has gaps."""
    if x.is_contiguous():
        return x
    order = order_of(x)
    return x.contiguous() if order is None else x.permute(order).view(-1)


def in_order_of(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return `grad` with the order in memory of its tensor `x`, which the receiver expects."""
    return grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)


def restored(
    memory: torch.Tensor, shape: Sequence[int], order: Sequence[int] | None
) -> torch.Tensor:
    """Return the tensor of this shape from its memory; inverse of `as_in_memory`.

    `order` is the result of `order_of`.
    """
    if order is None:
        return memory.view(tuple(shape))
    inverse = sorted(range(len(order)), key=lambda dim: order[dim])
    return memory.view([shape[dim] for dim in order]).permute(inverse)
