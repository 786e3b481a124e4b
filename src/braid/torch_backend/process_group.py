"""The process group of torch that every part of torch.distributed calls, over a group of braid."""

from __future__ import annotations

from typing import Any

import torch

from braid.torch_backend.collectives import Collectives
from braid.torch_backend.shapes import in_shared_memory, tensors_of
from braid.torch_backend.work import FinishedWork, PendingWork, together

__all__ = ["BraidProcessGroup"]

SLOTS_BYTES = (
    512 << 10
)  # fits into the slots of a channel, so it is on its way as soon as it is sent


class BraidProcessGroup(Collectives):
    """Collectives, messages and batches; torch's docstrings apply."""

    # Messages.

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Start sending a tensor."""
        (x,) = tensors_of(tensors)
        if not in_shared_memory(x):
            return self._elsewhere(x).send([x], dst, tag)
        if self._home.spare_cores and x.numel() * x.element_size() > SLOTS_BYTES:
            work = self._group.send(x, dst, tag=tag, async_op=True, timeout_s=self._timeout_s)
            return self._started(work, [x], lambda: dst)
        with self._group.coalesce() as batch:
            batch.send(x, dst, tag=tag, timeout_s=self._timeout_s)
        return self._passing(batch.work, [x], lambda: dst)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Start receiving a tensor."""
        (x,) = tensors_of(tensors)
        if not in_shared_memory(x):
            return self._elsewhere(x).recv([x], src, tag)
        with self._group.coalesce() as batch:
            batch.recv(x, src, tag=tag, timeout_s=self._timeout_s)
        return self._passing(batch.work, [x], lambda: src)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Start receiving from whoever sends first."""
        (x,) = tensors_of(tensors)
        if not in_shared_memory(x):
            return self._elsewhere(x).recv_anysource([x], tag)
        work = self._group.recv(x, None, tag=tag, async_op=True, timeout_s=self._timeout_s)
        return self._started(work, [x], lambda: work.source)

    # Several at once.

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._coalesced = []
        else:
            self._foreign.group(device)._start_coalescing(device)  # noqa: SLF001 - torch asks ours in the same way

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type != "cpu":
            return self._foreign.group(device)._end_coalescing(device)  # noqa: SLF001 - as above
        parts, self._coalesced = self._coalesced, None
        if not parts:
            return FinishedWork([])
        return PendingWork(together(parts), [], self._settle_later)
