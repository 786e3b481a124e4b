"""Ranks as threads of one process, for tests, the explorer and debuggers.

Memory (anonymous files), algorithms and waits are the same as for processes. Only access to a
peer's memory uses a dictionary instead of the kernel.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from braid.errors import CommError
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.closing import Closing
from braid.runtime.transport.base import MemoryTransport
from braid.runtime.transport.health import Health, Loss
from braid.runtime.transport.memory import MemoryFile, Root
from braid.runtime.transport.wait import Doorbells

__all__ = ["Fabric"]


class Fabric(Closing):
    """The memory of `world_size` ranks of one process; a context manager.

    Args:
        world_size: Number of ranks.
        clock: Time source for all ranks.
    """

    def __init__(self, world_size: int, clock: Clock | None = None) -> None:
        clock = clock or MonotonicClock()
        self._roots = [Root.create(rank) for rank in range(world_size)]
        self._bells = [Doorbells(root) for root in self._roots]
        self._views: list[_FabricView] = []
        self.transports = []
        for rank in range(world_size):
            view = _FabricView(self._roots, self._bells)
            self._views.append(view)
            self.transports.append(
                MemoryTransport(
                    rank,
                    world_size,
                    root=self._roots[rank],
                    bells=self._bells[rank],
                    peers=view,
                    clock=clock,
                    health=Health(rank, clock),
                    may_pull=True,
                    crowded=True,  # threads share the interpreter: spinning would block the others
                )
            )

    def lose(self, rank: int, reason: str, *, on_purpose: bool = False) -> None:
        """Report to all ranks that `rank` is lost."""
        for transport in self.transports:
            transport.health.report(Loss(rank, reason, on_purpose))

    def close(self) -> None:
        """Close every rank's memory; tensors in it stay valid until they are deleted."""
        for transport in self.transports:
            transport.close()


class _FabricView:
    """A rank's access to the memory of peers; maps each extent once more, as a process would."""

    def __init__(self, roots: list[Root], bells: list[Doorbells]) -> None:
        self._roots = roots
        self._bells = bells
        self._extents: dict[tuple[int, int], MemoryFile] = {}

    def root(self, rank: int) -> Root:
        return self._roots[rank]

    def extent(self, rank: int, extent_id: int) -> mmap.mmap:
        file = self._extents.get((rank, extent_id))
        if file is None:
            extent = self._roots[rank].extent(extent_id)
            if not extent.nbytes:
                msg = f"rank {rank} has no memory with id {extent_id}"
                raise CommError(msg)
            file = MemoryFile(os.dup(extent.fd), extent.nbytes, keep_fd=False)
            self._extents[rank, extent_id] = file
        return file.map

    def forget(self, rank: int, extent_id: int) -> None:
        file = self._extents.pop((rank, extent_id), None)
        if file is not None:
            file.close()

    def ring(self, rank: int, slots: int) -> None:
        if slots:
            self._bells[rank].ring_own()

    # all ranks share one process
    def pull(self, rank: int, address: int, out: torch.Tensor) -> None:  # noqa: ARG002
        nbytes = out.numel() * out.element_size()
        memory = (ctypes.c_char * nbytes).from_address(address)
        out.copy_(torch.frombuffer(memory, dtype=out.dtype).view(out.shape))

    def close(self) -> None:
        for file in self._extents.values():
            file.close()
        self._extents.clear()
