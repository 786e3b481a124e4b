"""Gradients that live in shared memory: a parameter's `.grad` becomes a view of a flat buffer.

A gradient is copied into its view once. From then on there is one copy of it: what later backwards
add to `.grad` goes into the buffer by itself, and what is reduced there is in `.grad` at once.
"""

from __future__ import annotations

import torch

__all__ = ["move_grad"]


def move_grad(param: torch.Tensor, view: torch.Tensor) -> bool:
    """Move the gradient of `param` into `view`, which becomes its `.grad`.

    Returns:
        False if there is no gradient, or one that is sparse or has a graph of its own.
    """
    grad = param.grad
    if grad is None or grad.layout != torch.strided or grad.requires_grad:
        return False
    if grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride():
        view.copy_(grad)
        # not `view` itself: a conversion of the module replaces the memory of this very object
        param.grad = view.detach()
    return True
