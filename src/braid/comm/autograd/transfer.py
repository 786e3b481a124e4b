"""Differentiable copies between devices, and waits between streams.

A pipeline on one machine copies activations between devices on separate streams, so that copies
overlap with computation. Backward copies gradients in the opposite direction, and the waits are
reversed as well. The dual of a copy from a to b is a copy from b to a; if b waits for a in forward,
a waits for b in backward.

    compute on device 0 │ copy stream of 0 ── copy ─▶ copy stream of 1 │ wait │ compute on device 1

Source: Kim et al., torchgpipe (2020), section 3.2.
"""

from __future__ import annotations

import torch

from braid.comm.autograd.linear_map import linear_map
from braid.comm.autograd.streams import (
    Stream,
    current_stream,
    device_of,
    record_stream,
    use_stream,
    wait_stream,
)

__all__ = ["copy", "wait"]

Tensors = tuple[torch.Tensor, ...]


def copy(*xs: torch.Tensor, source: Stream, destination: Stream) -> Tensors:
    """Return the tensors on the device of `destination`.

    The copy starts when the work queued so far on both streams has run. On one device nothing is
    copied, and the results share memory with `xs`. A copy between devices does not block the host,
    unless the destination is the CPU.

    Args:
        xs: Tensors on the device of `source`, made on that stream or waited for on it.
        source: Stream that reads.
        destination: Stream that writes; users of the results on other streams have to `wait` for
            it.

    Backward: copy from `destination` to `source`.
    """

    def run(*ts: torch.Tensor) -> Tensors:
        device = device_of(destination)
        user = current_stream(device)
        # torch queues a copy between devices on the current streams of both
        with use_stream(source), use_stream(destination):
            ys = tuple(_moved(t, device) for t in ts)
        wait_stream(destination, source)
        for t, y in zip(ts, ys, strict=True):
            record_stream(t, source)
            record_stream(y, destination)
            record_stream(y, user)
        return ys

    return linear_map(run, lambda *gs: copy(*gs, source=destination, destination=source), *xs)


def wait(*xs: torch.Tensor, waiting: Stream, awaited: Stream) -> Tensors:
    """Return the tensors for use on the stream `waiting`, after `awaited` has made them.

    Args:
        xs: Tensors; the results share their memory.
        waiting: Stream that will use them.
        awaited: Stream that makes them.

    Backward: reversed. `awaited` waits for `waiting`, which made the gradients.
    """

    def run(*ts: torch.Tensor) -> Tensors:
        wait_stream(waiting, awaited)
        for t in ts:
            record_stream(t, waiting)
        return tuple(t.detach() for t in ts)

    return linear_map(run, lambda *gs: wait(*gs, waiting=awaited, awaited=waiting), *xs)


def _moved(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on `device`; a copy to a GPU may still be in progress."""
    if device.type == "cuda" and t.device.type == "cpu":
        t = t.pin_memory()  # several cores; the driver uses one core
    # torch would not wait for the end of a non-blocking copy to host memory
    y = t.to(device, non_blocking=device.type != "cpu")
    return y.detach() if y is t else y
