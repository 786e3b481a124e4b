"""Shared memory for gradients that the engine reduces.

A new gradient is moved into this memory, which becomes the parameter's `.grad`. So there is only
one copy, and the engine reduces adjacent gradients in one message without copying them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from braid.compat.horovod.fusion import Fusion
from braid.compat.horovod.fusion.fusion_buffer import ALIGNMENT
from braid.parallel.gradients.flat import FlatBuffer
from braid.parallel.gradients.grad_view import move_grad

__all__ = ["SharedGrad", "SharedGrads"]


class SharedGrad(NamedTuple):
    """Memory of one parameter's gradient, and its place in shared memory.

    Attributes:
        tensor: Memory with the shape and strides of the parameter.
        place: Index of the gradient's first element, see `Request.place`; -1 outside of the shared
            memory.
        strides: Strides of the gradient, see `Request.strides`.
    """

    tensor: torch.Tensor
    place: int = -1
    strides: tuple[int, ...] = ()


class SharedGrads:
    """Shared memory for all gradients of an optimizer.

    Args:
        engine: Engine that reduces them.
        params: Parameters in the order of registration; the memory is in the reverse order, as
            backward computes gradients.

    Attributes:
        engine: Engine that reduces the gradients.
    """

    def __init__(self, engine: Fusion, params: Iterable[nn.Parameter]) -> None:
        self.engine = engine
        together: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for param in params:
            together.setdefault((param.dtype, param.device), []).append(param)
        self._places: dict[nn.Parameter, SharedGrad] = {}
        self._given: dict[nn.Parameter, weakref.ref[torch.Tensor]] = {}
        for (dtype, _), members in together.items():
            members.reverse()
            align = max(1, ALIGNMENT // members[0].element_size())
            buffer = FlatBuffer.for_params(members, engine.group, dtype, align=align)
            first = engine.reserve(buffer.tensor.numel())
            for param, view, start in zip(members, buffer.views, buffer.starts, strict=True):
                strides = () if view.is_contiguous() else view.stride()
                self._places[param] = SharedGrad(view, first + start, strides)

    def move_in(self, param: nn.Parameter) -> SharedGrad:
        """Move a parameter's gradient into the shared memory, and return the gradient's memory.

        The gradient stays in place if its dtype, device or shape has changed. It also does if the
        program still has a reference to the gradient of an earlier step.
        """
        place, grad = self._places.get(param), param.grad
        assert grad is not None  # the caller has checked it
        if grad.requires_grad:
            grad = param.grad = grad.detach()
        if place is None or not _fits(grad, place.tensor):
            return SharedGrad(grad)
        reference = self._given.get(param)
        former = None if reference is None else reference()
        if (former is not None and former is not grad) or not move_grad(param, place.tensor):
            return SharedGrad(grad)
        assert param.grad is not None  # it has been moved
        self._given[param] = weakref.ref(param.grad)
        return place

    def __repr__(self) -> str:
        return f"SharedGrads({len(self._places)} gradients)"


def _fits(grad: torch.Tensor, place: torch.Tensor) -> bool:
    return (grad.dtype, grad.device, grad.shape) == (place.dtype, place.device, place.shape)
