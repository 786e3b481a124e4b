"""Buffers of a model, such as running means, in a step of several micro-batches.

Each micro-batch begins with the buffers from before the step. After it all members have the values
after the first micro-batch, as in data parallel training, where rank 0 gives its own to all.
"""

from __future__ import annotations

import torch
from torch import nn

from braid.comm import Group
from braid.parallel.data_parallel.ddp.module_buffers import ModuleBuffers

__all__ = ["StepBuffers"]


class StepBuffers:
    """Keeps a model's buffers, such as running means, equal on members within a step.

    Args:
        group: Members with the same buffers.
        model: The model.
    """

    def __init__(self, group: Group, model: nn.Module) -> None:
        self._group = group
        self._model = model
        self._buffers = ModuleBuffers(group, model)
        self._before: dict[str, torch.Tensor] = {}
        self._after: dict[str, torch.Tensor] = {}

    def begin(self, *, is_first: bool) -> None:
        """Begin a micro-batch: save the buffers if `is_first` of a step, else restore them."""
        if is_first:
            self._before = self._copies()
        else:
            self.restore()

    def note_first(self) -> None:
        """On rank 0, save the buffers after the first micro-batch of the step, for `share`."""
        if not self._group.rank:
            self._after = self._copies()

    def share(self) -> None:
        """Copy rank 0's buffers after its first micro-batch to all members; a collective."""
        if self._buffers.any():
            if not self._group.rank:
                self._write(self._after)
            self._buffers.broadcast(0)

    def keep(self) -> None:
        """Drop the saved buffers, since the step is complete and is not repeated."""
        self._before = {}

    def restore(self) -> None:
        """Restore the buffers from before the step."""
        if self._before:
            self._write(self._before)

    def _copies(self) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def _write(self, values: dict[str, torch.Tensor]) -> None:
        """Write buffers that have a value; a forward may make others, or change a shape."""
        for name, buffer in self._model.named_buffers():
            value = values.get(name, buffer)
            if value.shape == buffer.shape:
                buffer.data.copy_(value)
            else:
                buffer.data = value.clone()
