"""Messages of a launcher and an agent in an event loop: what can be sent now is sent, the rest when there is room."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Sequence
from typing import Protocol

from braid.errors import CommError
from braid.launch.agent_messages import FromAgent, ToAgent, encode
from braid.wire import Buffer, Frame

__all__ = ["Channel", "Link"]

FRAMES_PER_TURN = 64  # of one agent, before the others have theirs


class Link(Protocol):
    """What carries frames: `PipeLink`, or a `SocketConnection`."""

    def fileno(self) -> int:
        """Descriptor that becomes readable."""
        ...

    def post(self, meta: bytes, buffers: Sequence[Buffer] = ()) -> int:
        """Queue a frame; returns the bytes that still wait."""
        ...

    def flush(self) -> int:
        """Write what fits; returns the bytes that still wait."""
        ...

    def try_recv(self) -> Frame | None:
        """The next frame if it is here."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class Channel:
    """A link that is watched by a selector.

    Args:
        link: Carries the frames; owned and closed by this object.
        on_frame: Called with the buffers of each frame, the message first.
        on_lost: Called once with the reason when the other end is gone or talks nonsense; the channel is closed then.

    Attributes:
        link: As given.
        queued_bytes: What waits to be written.
        unread: Whether there is more to `hear`, though its descriptor may not say so.
    """

    def __init__(
        self,
        link: Link,
        on_frame: Callable[[list[memoryview]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.link = link
        self.queued_bytes = 0
        self.unread = False
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._selector: selectors.BaseSelector | None = None
        self._closed = False
        # Numbers of our own: a selector knows each number once, and a link that breaks closes its own before it can be
        # taken out of the selector.
        told = getattr(link, "write_fileno", None)
        self._reader: int = os.dup(link.fileno())
        self._writer: int = os.dup(told() if told is not None else link.fileno())
        self._watching = False

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Be watched by `selector` from now on, whose keys' data is what to call."""
        self.unwatch()
        if not self._closed:
            self._selector = selector
            selector.register(self._reader, selectors.EVENT_READ, self.hear)
            self._note(self.queued_bytes)

    def unwatch(self) -> None:
        """Be watched no more."""
        if self._selector is not None:
            self._selector.unregister(self._reader)
            if self._watching:
                self._selector.unregister(self._writer)
                self._watching = False
            self._selector = None

    def send(self, message: ToAgent | FromAgent, *buffers: bytes) -> None:
        """Send a message as soon as there is room; into nothing when the other end is gone."""
        if self._closed:
            return
        try:
            self._note(self.link.post(b"", [encode(message), *buffers]))
        except CommError as exc:
            self._lose(str(exc))

    def hear(self) -> None:
        """Take what has arrived."""
        self.unread = False
        try:
            for _ in range(FRAMES_PER_TURN):
                if self._closed or (frame := self.link.try_recv()) is None:
                    return
                if frame.buffers:
                    self._on_frame(frame.buffers)
            self.unread = not self._closed
        except CommError as exc:
            self._lose(str(exc))

    def flush(self) -> None:
        """Write what there is room for."""
        if self._closed:
            return
        try:
            self._note(self.link.flush())
        except CommError as exc:
            self._lose(str(exc))

    def close(self) -> None:
        """Close the link. Idempotent."""
        if not self._closed:
            self.unwatch()
            self._closed = True
            os.close(self._reader)
            os.close(self._writer)
            self.link.close()

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._closed

    def _note(self, queued_bytes: int) -> None:
        self.queued_bytes = queued_bytes
        if self._selector is None or bool(queued_bytes) == self._watching:
            return
        if queued_bytes:
            self._selector.register(self._writer, selectors.EVENT_WRITE, self.flush)
        else:
            self._selector.unregister(self._writer)
        self._watching = bool(queued_bytes)

    def _lose(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._on_lost(reason)
