"""CUDA streams between the thread that submits, the engine's, and the one that waits.

Problem: a tensor that is submitted may still be computed, on the submitter's stream; the engine's
thread has a current stream of its own.

Idea: an event on the submitter's stream, for which the engine's stream waits before it reads; and
one on the engine's stream, for which the stream of a waiting thread waits. No thread waits for a
device. On the CPU there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["mark", "wait_for_points"]


def mark(tensor: torch.Tensor | None) -> torch.cuda.Event | None:
    """Return an event behind the work that computes `tensor` on this thread's stream.

    There is none on the CPU.
    """
    if tensor is None or tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def wait_for_points(
    events: Iterable[torch.cuda.Event | None], tensors: Iterable[torch.Tensor | None]
) -> None:
    """Let this thread's stream wait for points on others before it goes on.

    Args:
        events: Points on other streams.
        tensors: Tensors that are used from then on; their memory is not reused before this stream
            is through with it.
    """
    for event, tensor in zip(events, tensors, strict=True):
        if event is not None and tensor is not None:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(event)
            tensor.record_stream(stream)
