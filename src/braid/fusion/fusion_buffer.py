"""Memory in which tensors of a batch lie behind each other; made once, and again when more is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from braid.comm import Group
from braid.params import allocator

__all__ = ["FusionBuffer"]

ALIGNMENT = 64  # bytes; no two tensors share a cache line


class FusionBuffer:
    """One buffer for each device.

    Args:
        group: Whose members read it.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._memory: dict[str, torch.Tensor] = {}

    def views(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Room for these, of one dtype and device: all of it as one flat tensor, and a part for each.

        Gaps between them are zeros on all ranks, so that they may be reduced with them.
        """
        first = tensors[0]
        step = max(1, ALIGNMENT // first.element_size())
        widths = [-(-tensor.numel() // step) * step for tensor in tensors]
        total = sum(widths)
        flat = self._room(total, first)
        parts = torch.split(flat, widths)
        for part, tensor in zip(parts, tensors, strict=True):
            part[tensor.numel() :].zero_()
        views = [
            part[: tensor.numel()].view(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]
        return flat, views

    def _room(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        device = str(like.device)
        nbytes = numel * like.element_size()
        memory = self._memory.get(device)
        if memory is None or memory.numel() < nbytes:
            make: Callable[[Sequence[int], torch.dtype], torch.Tensor]
            make = allocator(self._group, device if like.device.type != "cpu" else "cpu")
            self._memory.pop(device, None)
            grown = 1 << max(16, (nbytes - 1).bit_length())
            memory = self._memory[device] = make((grown,), torch.uint8)
        return memory[:nbytes].view(like.dtype)

    def __repr__(self) -> str:
        return f"FusionBuffer({sum(m.numel() for m in self._memory.values())} bytes)"
