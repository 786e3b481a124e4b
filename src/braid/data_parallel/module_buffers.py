"""A module's buffers, such as running means, kept equal on all ranks: one broadcast per dtype and device."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from braid.comm import Group
from braid.params import FlatBuffer, allocator

__all__ = ["ModuleBuffers"]

_Kind = tuple[torch.dtype, str, tuple[torch.Size, ...]]


class ModuleBuffers:
    """Buffers of a module, floating and integer.

    Args:
        group: Ranks that hold the module.
        module: The same on all of them.
        ignored: Names of buffers that stay each rank's own.
    """

    def __init__(self, group: Group, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._group = group
        self._module = module
        self._ignored = frozenset(ignored)
        self._flat: dict[_Kind, FlatBuffer] = {}

    def any(self) -> bool:
        """Whether there are any."""
        return bool(self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """The buffers of now: `self.mean = ...` in a forward puts another tensor in the place of one."""
        named = self._module.named_buffers()
        return [buffer for name, buffer in named if name not in self._ignored]

    def broadcast(self, root: int = 0) -> None:
        """Copy the values of the group rank `root` to all; a collective."""
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in self.tensors():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for (dtype, device), members in kinds.items():
            flat = self._flat_of(dtype, device, members)
            if self._group.rank == root:
                for view, buffer in zip(flat.views, members, strict=True):
                    view.copy_(buffer)
            self._group.broadcast(flat.tensor, root)
            if self._group.rank != root:
                for view, buffer in zip(flat.views, members, strict=True):
                    buffer.data.copy_(
                        view
                    )  # a graph that has seen the old values may still be differentiated

    def _flat_of(
        self, dtype: torch.dtype, device: torch.device, members: list[torch.Tensor]
    ) -> FlatBuffer:
        shapes = tuple(member.shape for member in members)
        key = dtype, str(device), shapes
        flat = self._flat.get(key)
        if flat is None:
            allocate = allocator(self._group, str(device))
            flat = self._flat[key] = FlatBuffer(shapes, dtype, allocate)
        return flat
