"""Where gradients live while they are reduced: side by side, in memory that all ranks can read.

A gradient that comes is copied to its home, which becomes the parameter's `.grad`: from then on there is one copy of it, and the engine reduces neighbours in
one message without copying them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from braid.fusion import Fusion
from braid.fusion.fusion_buffer import ALIGNMENT
from braid.params.flat import FlatBuffer, allocator

__all__ = ["Home", "Homes"]


class Home(NamedTuple):
    """Of one gradient.

    Attributes:
        tensor: In the shape of its parameter, and with its strides.
        place: Of its first element, see `Request.place`; -1 for a gradient that is not at home.
        strides: As `Request.strides` has them.
    """

    tensor: torch.Tensor
    place: int = -1
    strides: tuple[int, ...] = ()


class Homes:
    """Of all gradients of an optimizer.

    Args:
        engine: That reduces them.
        params: In the order of registration: backward goes the other way, so do homes.

    Attributes:
        engine: As given.
    """

    def __init__(self, engine: Fusion, params: Iterable[nn.Parameter]) -> None:
        self.engine = engine
        together: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for param in params:
            together.setdefault((param.dtype, param.device), []).append(param)
        self._homes: dict[nn.Parameter, Home] = {}
        self._given: dict[nn.Parameter, weakref.ref[torch.Tensor]] = {}
        for (dtype, device), members in together.items():
            members.reverse()
            buffer = FlatBuffer(
                [param.shape for param in members],
                dtype,
                allocator(engine.group, "cpu" if device.type == "cpu" else str(device)),
                like=members,
                align=max(1, ALIGNMENT // members[0].element_size()),
            )
            first = engine.reserve(buffer.tensor.numel())
            for param, view, start in zip(members, buffer.views, buffer.starts, strict=True):
                strides = () if view.is_contiguous() else view.stride()
                self._homes[param] = Home(view, first + start, strides)

    def take_in(self, param: nn.Parameter) -> Home:
        """Bring a gradient home. It stays where it is if it does not fit there any more, or if somebody still holds that of a former step."""
        home, grad = self._homes.get(param), param.grad
        assert grad is not None  # the caller has seen to it
        if home is None or not _fits(grad, home.tensor):
            return Home(grad)
        there = grad.data_ptr() == home.tensor.data_ptr()
        if not there or grad.stride() != home.tensor.stride():
            before = self._given.get(param)
            if before is not None and before() is not None:
                return Home(grad)
            home.tensor.copy_(grad)
            param.grad = given = home.tensor.detach()
            self._given[param] = weakref.ref(given)
        return home

    def __repr__(self) -> str:
        return f"Homes({len(self._homes)} gradients)"


def _fits(grad: torch.Tensor, home: torch.Tensor) -> bool:
    alike = grad.dtype == home.dtype and grad.device == home.device and grad.shape == home.shape
    return alike and not grad.is_sparse
