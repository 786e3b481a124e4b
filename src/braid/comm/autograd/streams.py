"""Stream functions that accept CPU and CUDA streams, so that callers need not check the device.

On CUDA, streams run queued work concurrently. On the CPU every operation ends before the next
begins, so there is one stream, `CPU_STREAM`, and nothing to wait for.

Source: Kim et al., torchgpipe (2020), section 3.2 (non-default streams for copies).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, TypeAlias

import torch

__all__ = [
    "CPU_STREAM",
    "Stream",
    "current_stream",
    "default_stream",
    "device_of",
    "new_stream",
    "record_stream",
    "synchronize",
    "use_stream",
    "wait_stream",
]


class CPUStream:
    """The one stream of the CPU; `CPU_STREAM` is its only instance."""

    def __repr__(self) -> str:
        return "CPU_STREAM"


CPU_STREAM: Final = CPUStream()
Stream: TypeAlias = "torch.cuda.Stream | CPUStream"


def new_stream(device: torch.device) -> Stream:
    """Return a new stream of a CPU or CUDA device."""
    if device.type != "cuda":
        return CPU_STREAM
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> Stream:
    """Return the stream on which operations of this thread on `device` are queued."""
    return CPU_STREAM if device.type != "cuda" else torch.cuda.current_stream(device)


def default_stream(device: torch.device) -> Stream:
    """Return the default stream of `device`."""
    return CPU_STREAM if device.type != "cuda" else torch.cuda.default_stream(device)


def device_of(stream: Stream) -> torch.device:
    """Return the device on which a stream's work runs."""
    return torch.device("cpu") if isinstance(stream, CPUStream) else stream.device


@contextlib.contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    """Make `stream` and its device current for this thread, inside the context."""
    if isinstance(stream, CPUStream):
        yield
        return
    with torch.cuda.stream(stream):
        yield


def wait_stream(waiting: Stream, awaited: Stream) -> None:
    """Make later work on `waiting` run after the work queued so far on `awaited`.

    The host does not block, unless `waiting` is the CPU and `awaited` is a CUDA stream.
    """
    if isinstance(awaited, CPUStream):
        return  # its operations have ended
    if isinstance(waiting, CPUStream):
        awaited.synchronize()
    else:
        waiting.wait_stream(awaited)


def record_stream(x: torch.Tensor, stream: Stream) -> None:
    """Keep the memory of `x` from being reused until `stream` has run its queued work.

    Needed if `x` was made on another stream. For a view, this applies to the whole storage.
    """
    if isinstance(stream, CPUStream) or not x.is_cuda:
        return
    x.record_stream(stream)


def synchronize(stream: Stream) -> None:
    """Block until all work queued on `stream` has ended."""
    if not isinstance(stream, CPUStream):
        stream.synchronize()
