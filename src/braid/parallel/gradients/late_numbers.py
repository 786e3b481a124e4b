"""Numbers that a GPU computes, read later so that no thread waits for the GPU.

    launch 1   numbers of step 1 ─── copied beside the training ───┐
    launch 2   numbers of step 2 ...                               └── read here

A program queues kernels long before the GPU runs them. To read one number it would wait until
the GPU has come that far, and the GPU would wait for the program afterwards.
"""

from __future__ import annotations

import torch

__all__ = ["LateNumbers"]


class LateNumbers:
    """The last numbers that have arrived from a GPU."""

    def __init__(self) -> None:
        self._arriving: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def exchange(self, numbers: torch.Tensor) -> list[float]:
        """Start to copy `numbers`, and return the numbers of an earlier call; [] if none are new.

        Numbers are not copied while an earlier copy is under way, or a CUDA graph is captured.

        Args:
            numbers: Tensor [n] on a GPU; the same n and dtype in all calls.
        """
        if torch.cuda.is_current_stream_capturing():
            return []
        arrived: list[float] = []
        if self._event is not None:
            if not self._event.query():  # type: ignore[no-untyped-call]
                return arrived
            assert self._arriving is not None
            arrived = self._arriving.tolist()
        if self._arriving is None:
            self._arriving = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._arriving.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(numbers.device))
        return arrived
