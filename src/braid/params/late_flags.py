"""Flags that a GPU computes, read later so that no thread waits for the GPU.

    launch 1   flags of step 1 ─── copied beside the training ───┐
    launch 2   flags of step 2 ...                               └── read here

A program queues kernels long before the GPU runs them. To read one flag it would have to wait until
the GPU has come that far, and the GPU would wait for the program afterwards.
"""

from __future__ import annotations

import torch

__all__ = ["LateFlags"]


class LateFlags:
    """The last flags that have arrived from a GPU.

    Args:
        count: Number of flags.
    """

    def __init__(self, count: int) -> None:
        self._all_true = [True] * count
        self._arriving: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def exchange(self, flags: torch.Tensor) -> list[bool]:
        """Start to copy `flags`, and return the flags of an earlier call; all True if none are new.

        Flags are left out while those of an earlier call are on their way, and while a CUDA graph
        is captured.

        Args:
            flags: Booleans on a GPU.
        """
        if torch.cuda.is_current_stream_capturing():
            return self._all_true
        arrived = self._all_true
        if self._event is not None:
            if not self._event.query():  # type: ignore[no-untyped-call]
                return arrived
            assert self._arriving is not None
            arrived = self._arriving.tolist()
        if self._arriving is None:
            self._arriving = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True)
        self._arriving.copy_(flags, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(flags.device))
        return arrived
