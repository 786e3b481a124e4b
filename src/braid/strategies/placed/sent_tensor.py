"""Tensors as they travel between tasks: with their strides.

Kernels choose their order of sums by strides, and `view` fails for others. So a tensor that arrives
has the strides that it has in one process. Only elements travel: dims that are expanded have one
element, and gaps of slices are made again by the receiver.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from braid import rpc

__all__ = ["SentTensor", "arrived", "sent"]


@rpc.register
@dataclass(frozen=True, slots=True)
class SentTensor:
    """Tensor as it is sent from one part to another, with its strides.

    Attributes:
        elements: Contiguous elements, with size 1 in expanded dims; None for a missing gradient.
        strides: Strides of the tensor; None if `elements` has the same ones.
        shape: Shape of the tensor; None if `elements` has the same one.
        requires_grad: Whether the receiver sends back a gradient.
    """

    elements: torch.Tensor | None
    strides: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    requires_grad: bool = False


def sent(x: torch.Tensor | None, *, requires_grad: bool = False) -> SentTensor:
    """Return a tensor in the form in which it is sent to another task."""
    if x is None:
        return SentTensor(None)
    x = x.detach()
    if x.layout is not torch.strided:
        return SentTensor(x.cpu(), requires_grad=requires_grad)
    if x.is_contiguous():
        return SentTensor(x.cpu(), requires_grad=requires_grad)
    dense = x
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            dense = dense.narrow(dim, 0, 1)
    return SentTensor(dense.contiguous().cpu(), x.stride(), tuple(x.shape), requires_grad)


def arrived(value: SentTensor, device: torch.device) -> torch.Tensor | None:
    """Return the received tensor on a device, with the strides that it had at the sender."""
    if value.elements is None:
        return None
    elements = value.elements.to(device)
    if value.strides is None or value.shape is None:
        return elements
    x = torch.empty_strided(
        tuple(elements.shape), value.strides, dtype=elements.dtype, device=device
    ).copy_(elements)
    return x.expand(value.shape)
