"""The process group of torch that every part of torch.distributed calls, over a group of braid."""

from __future__ import annotations

from typing import Any

import torch

from braid.torch_backend.collectives import Collectives
from braid.torch_backend.shapes import in_shared_memory, tensors_of
from braid.torch_backend.work import FinishedWork, PendingWork, together

__all__ = ["BraidProcessGroup"]


class BraidProcessGroup(Collectives):
    """Collectives, messages and batches; torch's docstrings apply."""

    # Messages.

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Start sending a tensor."""
        x = tensors_of(tensors)[0]
        if not in_shared_memory(x):
            return self._elsewhere(x).send(tensors_of(tensors), dst, tag)
        group, timeout_s = self._group, self._timeout_s
        return self._message(
            group.send(x, dst, tag=tag, async_op=True, timeout_s=timeout_s), [x], dst
        )

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Start receiving a tensor."""
        x = tensors_of(tensors)[0]
        if not in_shared_memory(x):
            return self._elsewhere(x).recv(tensors_of(tensors), src, tag)
        group, timeout_s = self._group, self._timeout_s
        return self._message(
            group.recv(x, src, tag=tag, async_op=True, timeout_s=timeout_s), [x], src
        )

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Start receiving from whoever sends first."""
        x = tensors_of(tensors)[0]
        if not in_shared_memory(x):
            return self._elsewhere(x).recv_anysource(tensors_of(tensors), tag)
        group, timeout_s = self._group, self._timeout_s
        return self._message(
            group.recv(x, None, tag=tag, async_op=True, timeout_s=timeout_s), [x], None
        )

    def _message(self, work: Any, tensors: list[torch.Tensor], peer: int | None) -> Any:
        if self._backward.held:
            self._backward.release()
        if self._coalesced is not None:
            self._coalesced.append(work)
        source = (lambda: work.source) if peer is None else (lambda: peer)
        return PendingWork(work, tensors, self._backward.watch, source)

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
        return PendingWork(together(parts), [], self._backward.watch)
