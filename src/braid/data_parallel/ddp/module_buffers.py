"""A module's buffers, such as running means, kept equal on all ranks: one broadcast per device, whatever their dtypes."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn

from braid.comm import Group, Request, Work
from braid.errors import ConfigError
from braid.params import allocator

__all__ = ["ModuleBuffers"]

ALIGNMENT = 64  # bytes
MAX_LAYOUTS = 8  # of a device; forwards may put buffers of another shape in their places every time

_Layout = tuple[tuple[torch.dtype, torch.Size], ...]


class _Packed(NamedTuple):
    """Room for all of them.

    Attributes:
        memory: Bytes.
        views: One for each, in it.
        requests: By root.
    """

    memory: torch.Tensor
    views: list[torch.Tensor]
    requests: dict[int, Request]


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
        self._known: dict[torch.device, dict[_Layout, _Packed]] = {}
        self._change = False
        self._sent_by = -1  # rank whose values went beside the last status

    def any(self) -> bool:
        """Whether there are any."""
        return bool(self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """The buffers of now: `self.mean = ...` in a forward puts another tensor in the place of one."""
        named = self._module.named_buffers()
        return [buffer for name, buffer in named if name not in self._ignored]

    def broadcast(self, root: int = 0) -> None:
        """Copy the values of the group rank `root` to all; a collective.

        Raises:
            ConfigError: Elements of a buffer share memory, so that it cannot be written to.
        """
        for work in self.start(root):
            work.wait()
        self.receive(root)

    def send_early(self, root: int) -> list[Work]:
        """Beside the status of a step: where buffers changed in the last one, they will have changed in this one. A collective.

        Args:
            root: Rank that has the values, as far as is known before the status.
        """
        self._sent_by = root if self._change else -1
        return self.start(root) if self._change else []

    def settle(self, root: int, *, change: bool) -> None:
        """After the status: let all have what `root` has, if buffers have changed; a collective."""
        self._change = change
        if not change:
            return
        if self._sent_by == root:
            self.receive(root)
        else:  # nothing has been sent, or by a rank that has joined
            self.broadcast(root)

    def start(self, root: int = 0) -> list[Work]:
        """Send the values of `root`, beside something else; a collective. `receive` puts them in their places when these are done."""
        works = []
        for packed, members in self._by_device():
            if self._group.rank == root:
                torch._foreach_copy_(packed.views, members)
            request = packed.requests.get(root)
            if request is None:
                request = self._group.persistent("broadcast", packed.memory, root=root)
                packed.requests[root] = request
            works.append(request.start(lazily=True))
        return works

    def receive(self, root: int) -> None:
        """Let buffers have what `root` has sent."""
        if self._group.rank != root:
            for packed, members in self._by_device():
                torch._foreach_copy_(members, packed.views)

    def _by_device(self) -> list[tuple[_Packed, list[torch.Tensor]]]:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for (
            buffer
        ) in self.tensors():  # .data: graphs that have seen old values may still be differentiated
            by_device.setdefault(buffer.device, []).append(buffer.data)
        return [(self._packed(device, members), members) for device, members in by_device.items()]

    def _packed(self, device: torch.device, members: list[torch.Tensor]) -> _Packed:
        layout = tuple((member.dtype, member.shape) for member in members)
        known = self._known.setdefault(device, {})
        packed = known.get(layout)
        if packed is None:
            self._refuse_expanded()
            if len(known) == MAX_LAYOUTS:
                for request in known.pop(next(iter(known))).requests.values():
                    request.retire()
            sizes = [member.numel() * member.element_size() for member in members]
            rooms = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
            memory = allocator(self._group, str(device))((sum(rooms),), torch.uint8)
            parts = zip(torch.split(memory, rooms), sizes, members, strict=True)
            views = [part[:size].view(own.dtype).view(own.shape) for part, size, own in parts]
            packed = known[layout] = _Packed(memory, views, {})
        return packed

    def _refuse_expanded(self) -> None:
        expanded = [
            repr(name)
            for name, buffer in self._module.named_buffers()
            if name not in self._ignored and torch._debug_has_internal_overlap(buffer) == 1  # noqa: SLF001 - there is no public way
        ]
        if expanded:
            msg = f"expected buffers whose elements have memory of their own, found {', '.join(expanded)} expanded: register them with .clone()"
            raise ConfigError(msg)
