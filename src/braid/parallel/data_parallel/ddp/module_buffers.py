"""A module's buffers, such as running means, kept equal on all ranks.

Buffers of all dtypes are packed into one flat piece of memory per device: one broadcast sends all.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn

from braid.comm import Group, Request, StepsBy, Work
from braid.errors import ConfigError
from braid.parallel.gradients import FlatBuffer, allocator
from braid.runtime.torch_internals import foreach_copy_, has_internal_overlap

__all__ = ["ModuleBuffers"]

ALIGNMENT = 64  # bytes
MAX_LAYOUTS = 8  # per device; a forward may replace buffers by ones of a new shape every time

_Layout = tuple[tuple[torch.dtype, torch.Size], ...]


class _PackedBuffers(NamedTuple):
    """Packed memory for all buffers on a device.

    Attributes:
        memory: Bytes of all buffers.
        views: One view per buffer, in the memory.
        requests: Broadcasts of the memory by root.
    """

    memory: torch.Tensor
    views: list[torch.Tensor]
    requests: dict[int, Request]


class ModuleBuffers:
    """Buffers of a module, floating and integer.

    Args:
        group: Ranks that hold the module.
        module: The same module on all of them.
        ignored: Names of buffers that are not kept equal.
    """

    def __init__(self, group: Group, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._group = group
        self._module = module
        self._ignored = frozenset(ignored)
        self._known: dict[torch.device, dict[_Layout, _PackedBuffers]] = {}
        self._changed = False
        self._early_root = -1  # rank that sent its values with the last status

    def any(self) -> bool:
        """Return whether the module has buffers that are kept equal."""
        return bool(self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Return the current buffers: `self.mean = ...` in a forward replaces one."""
        named = self._module.named_buffers()
        return [buffer for name, buffer in named if name not in self._ignored]

    def broadcast(self, root: int = 0) -> None:
        """Copy the values of the group rank `root` to all ranks; a collective.

        Raises:
            ConfigError: Elements of a buffer share memory, so it cannot be written to.
        """
        for work in self._start(root):
            work.wait()
        self._receive(root)

    def start_early(self, root: int) -> list[Work]:
        """Start to send the values of `root` if buffers changed in the last step; a collective.

        The buffers then probably change in this step as well. `finish` copies the received values.

        Args:
            root: Rank that probably has the newest values; `finish` gets the rank that really has
                them.
        """
        self._early_root = root if self._changed else -1
        return self._start(root) if self._changed else []

    def finish(self, root: int, *, changed: bool) -> None:
        """Copy the values of `root` to all ranks if buffers have changed; a collective."""
        self._changed = changed
        if not changed:
            return
        if self._early_root == root:
            self._receive(root)
        else:  # nothing was sent, or the sender has joined
            self.broadcast(root)

    def _start(self, root: int) -> list[Work]:
        works = []
        for packed, members in self._by_device():
            if self._group.rank == root:
                foreach_copy_(packed.views, members)
            request = packed.requests.get(root)
            if request is None:
                request = self._group.persistent("broadcast", packed.memory, root=root)
                packed.requests[root] = request
            works.append(request.start(steps_by=StepsBy.WAITER))
        return works

    def _receive(self, root: int) -> None:
        if self._group.rank != root:
            for packed, members in self._by_device():
                foreach_copy_(members, packed.views)

    def _by_device(self) -> list[tuple[_PackedBuffers, list[torch.Tensor]]]:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for buffer in self.tensors():
            # .data: graphs recorded with old values may still be differentiated
            by_device.setdefault(buffer.device, []).append(buffer.data)
        return [(self._packed(device, members), members) for device, members in by_device.items()]

    def _packed(self, device: torch.device, members: list[torch.Tensor]) -> _PackedBuffers:
        layout = tuple((member.dtype, member.shape) for member in members)
        known = self._known.setdefault(device, {})
        packed = known.get(layout)
        if packed is None:
            self._refuse_expanded()
            if len(known) == MAX_LAYOUTS:
                for request in known.pop(next(iter(known))).requests.values():
                    request.retire()
            sizes = [torch.Size((member.numel() * member.element_size(),)) for member in members]
            make = allocator(self._group, str(device))
            flat = FlatBuffer(sizes, torch.uint8, make, align=ALIGNMENT)
            pairs = zip(flat.views, members, strict=True)
            views = [view.view(buffer.dtype).view(buffer.shape) for view, buffer in pairs]
            packed = known[layout] = _PackedBuffers(flat.tensor, views, {})
        return packed

    def _refuse_expanded(self) -> None:
        expanded = [
            repr(name)
            for name, buffer in self._module.named_buffers()
            if name not in self._ignored and has_internal_overlap(buffer) == 1
        ]
        if expanded:
            msg = (
                f"elements of buffers {', '.join(expanded)} share memory (expand), so they cannot "
                "be written to: register the buffers with .clone()"
            )
            raise ConfigError(msg)
