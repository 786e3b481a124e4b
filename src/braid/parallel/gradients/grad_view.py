"""Gradients in shared memory: a parameter's `.grad` becomes a view of a flat buffer.

A gradient is copied into its view once. From then on there is one copy of it: later backwards add
to the buffer through `.grad`, and reduced values are in `.grad` without a copy.

A gradient with a graph (`create_graph=True`) stays outside and is copied. The average replaces its
values, and keeps the graph of this rank's gradient:

    g = mean over ranks of g_r      loss' = f(g), the same on all ranks
    d loss'/dw = f'(g) mean(dg_r/dw) = mean over ranks of f'(g) dg_r/dw

So the average of the ranks' results in the second backward is the derivative of the average, and
the second backward needs no communication except its own averaging.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["averaged_with_graph", "move_grad"]


def move_grad(param: torch.Tensor, view: torch.Tensor) -> bool:
    """Move the gradient of `param` into `view`, which becomes its `.grad`.

    A gradient with a graph is copied to `view`, and stays `.grad`.

    Returns:
        False if the gradient is None or sparse.
    """
    grad = param.grad
    if grad is None or grad.layout != torch.strided:
        return False
    if grad.requires_grad:
        view.copy_(grad.detach())
    elif grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride():
        view.copy_(grad)
        # not `view` itself: converting the module replaces the memory of this object
        param.grad = view.detach()
    return True


class _Averaged(torch.autograd.Function):
    """Values of the average with the graph of this rank's gradient."""

    @staticmethod
    def forward(_ctx: Any, _own: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
        return average.clone()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def averaged_with_graph(grad: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
    """Return a copy of `average` with the autograd graph of this rank's gradient `grad`."""
    with torch.enable_grad():
        averaged: torch.Tensor = _Averaged.apply(grad, average)  # type: ignore[no-untyped-call]
    return averaged
