"""Streams as functions that know the CPU: no caller asks which device it is on.

On CUDA, work is queued on streams that run beside each other; on the CPU every operation ends
before the next begins, so there is one stream and nothing to wait for. `CPU_STREAM` stands for it.
Everything here takes either.

Source: Kim et al., torchgpipe (2020), section 3.2 (non-default streams for copies).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, TypeAlias

import torch

__all__ = [
    "CPU_STREAM",
    "CPUStream",
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
    """Return the stream that is current unless another one is chosen."""
    return CPU_STREAM if device.type != "cuda" else torch.cuda.default_stream(device)


def device_of(stream: Stream) -> torch.device:
    """Return the device on which a stream's work runs."""
    return torch.device("cpu") if isinstance(stream, CPUStream) else stream.device


@contextlib.contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    """Make `stream` (and its device) the current one of this thread."""
    if isinstance(stream, CPUStream):
        yield
        return
    with torch.cuda.stream(stream):
        yield


def wait_stream(waiting: Stream, awaited: Stream) -> None:
    """Let work queued on `waiting` from now on run after the work queued on `awaited` so far.

    The host goes on, unless the CPU itself has to wait for a device.
    """
    if isinstance(awaited, CPUStream):
        return  # what ran there has ended
    if isinstance(waiting, CPUStream):
        awaited.synchronize()
    else:
        waiting.wait_stream(awaited)


def record_stream(x: torch.Tensor, stream: Stream) -> None:
    """Keep the memory of `x` from being reused before `stream` is done with it.

    Needed where `x` was made on another stream. A view stands for its whole storage.
    """
    if isinstance(stream, CPUStream) or not x.is_cuda:
        return
    x.record_stream(stream)


def synchronize(stream: Stream) -> None:
    """Return when everything queued on `stream` has ended."""
    if not isinstance(stream, CPUStream):
        stream.synchronize()
