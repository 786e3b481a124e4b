"""Protocol of a stream of frames, either a socket or a pair of pipes, for vans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from braid.runtime.wire import Allocate, Buffer, Frame

__all__ = ["FrameStream"]


class FrameStream(Protocol):
    """Nonblocking stream of frames: a `Connection`, or a `PipeStream`."""

    @property
    def peer(self) -> object:
        """Other end, as named in errors."""
        ...

    def fileno(self) -> int:
        """Return the descriptor to read from."""
        ...

    def post(self, meta: bytes, buffers: Sequence[Buffer] = ()) -> int | None:
        """Queue a frame and write what the kernel accepts now.

        Returns:
            Number of bytes still queued; None if the peer accepts nothing more.
        """
        ...

    def flush(self) -> int | None:
        """Write bytes that the kernel accepts now; returns what `post` returns."""
        ...

    def try_recv(self, allocate: Allocate | None = None) -> Frame | None:
        """Return the next frame if it has arrived; else None."""
        ...

    def close(self) -> None:
        """Close the stream. Idempotent."""
        ...
