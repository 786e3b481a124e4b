"""Where gradients live while they are reduced: side by side, in memory that all ranks can read.

A gradient that comes is copied to its home, which becomes the parameter's `.grad`: from then on there is one copy of it, and the engine reduces neighbours in
one message without copying them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from braid.comm import Group
from braid.fusion.fusion_buffer import ALIGNMENT
from braid.params import allocator
from braid.params.flat import shaped

__all__ = ["Home", "Homes"]


class Home(NamedTuple):
    """Of one gradient.

    Attributes:
        view: In the shape and strides of its parameter.
        place: Of its first element.
    """

    view: torch.Tensor
    place: int


class Homes:
    """Of all gradients of an optimizer.

    Args:
        group: Whose members read them.
        params: In the order of registration: backward goes the other way, so do homes.
    """

    def __init__(self, group: Group, params: Iterable[nn.Parameter]) -> None:
        together: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for param in params:
            together.setdefault((param.dtype, param.device), []).append(param)
        self._homes: dict[nn.Parameter, Home] = {}
        for (dtype, device), members in together.items():
            step = max(1, ALIGNMENT // members[0].element_size())
            widths = [-(-param.numel() // step) * step for param in reversed(members)]
            make = allocator(group, "cpu" if device.type == "cpu" else str(device))
            flat, start = make((sum(widths),), dtype), 0
            for param, width in zip(reversed(members), widths, strict=True):
                view = shaped(flat[start : start + param.numel()], param)
                self._homes[param] = Home(view, start)
                start += width

    def take_in(self, param: nn.Parameter) -> int:
        """Bring a gradient home; its place, -1 if it cannot live there."""
        home, grad = self._homes.get(param), param.grad
        if home is None or grad is None or grad.is_sparse or grad.dtype != home.view.dtype:
            return -1
        if grad.data_ptr() != home.view.data_ptr() or grad.stride() != home.view.stride():
            home.view.copy_(grad)
            param.grad = home.view.detach()
        return home.place

    def __repr__(self) -> str:
        return f"Homes({len(self._homes)} gradients)"
