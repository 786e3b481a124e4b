"""The protocol of a stream of frames, be it a socket or a pair of pipes, as vans use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from braid.runtime.wire import Allocate, Buffer, Frame

__all__ = ["FrameStream"]


class FrameStream(Protocol):
    """A stream of frames that never blocks: a `Connection`, or a `PipeStream`."""

    @property
    def peer(self) -> object:
        """The other end, as errors name it."""
        ...

    @property
    def gone(self) -> bool:
        """Whether writing has shown that the peer accepts nothing more."""
        ...

    @property
    def has_bytes(self) -> bool:
        """Whether bytes have been read ahead, which no selector shows."""
        ...

    def fileno(self) -> int:
        """Descriptor to read from."""
        ...

    def post(self, meta: bytes, buffers: Sequence[Buffer] = ()) -> int:
        """Queue a frame and write what the kernel accepts now.

        Returns:
            The bytes still queued; 0 for a peer that is `gone`.
        """
        ...

    def flush(self) -> int:
        """Write what the kernel accepts now; returns the bytes still queued."""
        ...

    def try_recv(self, allocate: Allocate | None = None) -> Frame | None:
        """Return the next frame if it is here."""
        ...

    def close(self) -> None:
        """Close the stream. Idempotent."""
        ...
