"""Memory for the concatenated tensors of a batch; grows on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from braid.comm import Group
from braid.compat.horovod.fusion.batching import FusedBatch
from braid.parallel.gradients import FlatBuffer, allocator

__all__ = ["ALIGNMENT", "FusionBuffer"]

MAX_KNOWN = 64
ALIGNMENT = 64  # bytes; no two tensors share a cache line


class _BatchPlace(NamedTuple):
    batch: FusedBatch
    buffer: FlatBuffer


class FusionBuffer:
    """Buffers into which tensors of a fused operation are copied, one per device.

    Args:
        group: Group with the ranks that read the buffer.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._memory: dict[str, torch.Tensor] = {}
        # batches that repeat in every step are the same objects
        self._known: dict[int, _BatchPlace] = {}

    def views(
        self, batch: FusedBatch, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return memory for a batch: a flat tensor, and a view of it for each tensor of the batch.

        The gaps between the views have arbitrary content.
        """
        known = self._known.get(id(batch))
        if known is not None and known.batch is batch:
            return known.buffer.tensor, known.buffer.views
        first = tensors[0]
        buffer = FlatBuffer(
            [tensor.shape for tensor in tensors],
            first.dtype,
            lambda shape, _: self.scratch(shape[0], first),
            align=max(1, ALIGNMENT // first.element_size()),
        )
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[id(batch)] = _BatchPlace(batch, buffer)
        return buffer.tensor, buffer.views

    def scratch(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return a temporary flat tensor with the dtype and device of `like`.

        Different calls may return the same memory.
        """
        device = str(like.device)
        nbytes = numel * like.element_size()
        memory = self._memory.get(device)
        if memory is None or memory.numel() < nbytes:
            make: Callable[[Sequence[int], torch.dtype], torch.Tensor]
            make = allocator(self._group, device if like.device.type != "cpu" else "cpu")
            self._memory.pop(device, None)
            self._known.clear()
            grown = 1 << max(16, (nbytes - 1).bit_length())
            memory = self._memory[device] = make((grown,), torch.uint8)
        return memory[:nbytes].view(like.dtype)

    def __repr__(self) -> str:
        return f"FusionBuffer({sum(m.numel() for m in self._memory.values())} bytes)"
