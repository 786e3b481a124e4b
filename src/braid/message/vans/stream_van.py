"""A van over streams: one thread that writes and reads frames, whatever the streams are made of.

Problem: threads that send must not wait for each other's peers, and large messages must not hold up
small ones, though a stream has one order and a process has one interpreter lock.

Idea: one thread waits for all streams. A thread that sends also tries at once to write, under the
van's lock, so a small message costs one system call and no change of threads. The van's thread
writes the rest, which the kernel did not accept. A frame leaves the queue when the one before it is
with the kernel, so an urgent message waits for one chunk, and for what the kernel has already
buffered. Buffers go from the sender's memory through the kernel into the receiver's.

A broken stream is a lost peer, and stays one until it is connected again: only the layers above
know what the peer may have done already. When a write fails, nothing more is written, and the
stream is read on, because the last messages of the peer are in it.

Source: the reactor pattern (D. Schmidt, 1995), with leaders that write for themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from braid.clock import Clock, MonotonicClock
from braid.errors import CommError, ConfigError
from braid.message.protocol.schema import Schema
from braid.message.protocol.van_state import VanState
from braid.message.protocol.vocabulary import MAX_CHUNK_BYTES, VanConfig, split_node
from braid.message.van import Van
from braid.wire import Allocate, Buffer, Frame, FrameLimits, Identity, Listener

__all__ = ["FRAME_LIMITS", "Stream", "StreamVan", "node_of"]

FRAME_LIMITS = FrameLimits(max_frame_bytes=MAX_CHUNK_BYTES + (64 << 10))
_FRAMES_PER_TURN = 8  # frames of one link before other links, and the lock, have a turn


class Stream(Protocol):
    """A stream of frames that never blocks: a `SocketConnection`, or a `PipeStream`."""

    @property
    def peer(self) -> object:
        """The other end, as errors name it."""
        ...

    @property
    def gone(self) -> bool:
        """Whether writing has shown that the peer accepts nothing more."""
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


@dataclass(slots=True, eq=False)
class _Wire:
    """The stream of a link, as the van's thread sees it.

    Attributes:
        stream: The stream.
        reader: Descriptor to read from, which the stream forgets when it ends.
        writer: Descriptor to write to; that of `reader`, unless the stream is a pair of pipes.
        pending: Whether the last frame is not yet with the kernel.
        registered: Events for which the selector polls each descriptor.
    """

    stream: Stream
    reader: int
    writer: int
    pending: bool = False
    registered: dict[int, int] = field(default_factory=dict)


class StreamVan(Van):
    """A `Van` over streams, with the thread that writes and reads them.

    `SocketVan` and `PipeVan` add how streams are opened.

    Args:
        node: Name of this node.
        schema: Messages, the same on all nodes.
        listener: Listener for connections of other nodes; owned and closed by this object.
        epoch: Membership epoch to begin with.
        config: Limits and times.
        clock: Clock of deadlines, which must move by itself; the host's when None.

    On failure: a peer whose process ends is lost at once; one that is stopped, or whose host or
    network is gone, after `lost_after_s` of silence. A frame must arrive within that time, too: a
    peer slower than one chunk in it is lost. While this node does not read from a peer, the peer's
    silence is ignored.
    """

    def __init__(
        self,
        node: str,
        schema: Schema,
        *,
        listener: Listener | None = None,
        epoch: int = 0,
        config: VanConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or MonotonicClock()
        # The wall clock, so that a later life has another number; nothing is measured with it.
        state = VanState(
            node, schema, config or VanConfig(), incarnation=time.time_ns(), epoch=epoch
        )
        super().__init__(state, schema, clock, threading.Condition())
        self._listener = listener
        self._numbers = itertools.count(1)
        self._wires: dict[int, _Wire] = {}
        self._retired: list[_Wire] = []  # to be closed by the thread
        self._due: set[int] = set()  # links to poll though nothing is readable
        self._stopping = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
        # A daemon, so that a program that forgets to close it can still end.
        name = f"braid-message-{node}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _cut(self, link: int) -> None:
        wire = self._wires.pop(link)
        self._due.discard(link)
        self._retired.append(wire)
        self._wake()

    def _read_again(self, link: int) -> None:
        self._schedule(link)

    def _release(self) -> None:
        self._stopping = True
        self._wake()
        self._thread.join()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _adopt(self, stream: Stream, peer: str, *, known: bool = False) -> int:
        """Make a link of a stream whose other end is proven to be `peer`; with the guard held."""
        if self._ended:
            stream.close()
        self._check_open()
        link = next(self._numbers)
        reader = stream.fileno()
        writer = getattr(stream, "write_fileno", stream.fileno)()
        self._wires[link] = _Wire(stream, reader, writer)
        self._state.link_up(link, peer, self._clock.now_ns(), known=known)
        self._schedule(link)
        self._act()
        return link

    def _schedule(self, link: int) -> None:
        """Let the thread poll a link; with the guard held."""
        self._due.add(link)
        self._wake()

    def _wake(self) -> None:
        if threading.current_thread() is self._thread:
            return
        # A full pipe means that it will wake anyway; a closed one, that there is nothing to wake.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"w")

    def _carry(self, link: int) -> None:
        """Write frames until the kernel accepts no more, or the turn is over. In any thread."""
        wire = self._wires.get(link)
        if wire is None or wire.stream.gone:
            return
        if wire.pending:
            self._wake()  # what was queued may have a deadline that the thread does not know
            return
        now_ns = self._clock.now_ns()
        try:
            for _ in range(_FRAMES_PER_TURN):
                frame = self._state.next_frame(link, now_ns)
                if frame is None:
                    return
                wire.pending = wire.stream.post(frame.meta, frame.pieces) > 0
                if wire.pending or not self._written(link, wire, now_ns):
                    break
        except CommError as exc:
            self._state.link_lost(link, _reason(exc, wire))
            return
        self._schedule(link)

    def _written(self, link: int, wire: _Wire, now_ns: int) -> bool:
        """Record that a frame has left, or is dropped; returns whether the peer accepts more."""
        if wire.stream.gone:
            self._state.link_half_closed(link, "it accepts nothing more", now_ns)
            return False
        self._state.frame_sent(link, now_ns)
        return True

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._close_retired()
                polled_ns = self._clock.now_ns()
                for key, events in self._selector.select(self._pause_s()):
                    if key.fileobj is self._wake_reader:
                        with contextlib.suppress(BlockingIOError):
                            self._wake_reader.recv(4096)
                    elif key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._poll_link(key.data, events)
                with self._guard:
                    due, self._due = self._due, set()
                for link in due:
                    self._poll_link(link, 0)
                self._tick(polled_ns)
        finally:
            with self._guard:  # whatever happened, nobody waits for a thread that is gone
                self._ended = self._ended or f"the thread of the van of {self.node} has failed"
                self._state.close()
                self._act()
            self._close_retired()

    def _pause_s(self) -> float | None:
        """Seconds for which nothing is to do unless a stream is ready."""
        with self._guard:
            if self._due:
                return 0
            deadlines = [self._state.next_deadline_ns()]
        if self._listener is not None:
            deadlines.append(self._listener.next_deadline_ns())
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0, min(known) - self._clock.now_ns()) / 1e9 if known else None

    def _tick(self, now_ns: int) -> None:
        """Do what was due before the last poll of the streams.

        What has become due since then must wait: a process that was stopped would otherwise declare
        peers lost that it has not read from.
        """
        if self._listener is not None:
            overdue_ns = self._listener.next_deadline_ns()
            if overdue_ns is not None and overdue_ns <= now_ns:
                self._accept()
        with self._guard:
            self._tick_if_due(now_ns)

    def _close_retired(self) -> None:
        """Close the streams of links that are gone.

        Descriptors are used again, so this comes before new ones are registered.
        """
        with self._guard:
            retired, self._retired = self._retired, []
            for wire in retired:
                for fd in wire.registered:
                    self._selector.unregister(fd)
                wire.stream.close()

    def _accept(self) -> None:
        """Advance the handshakes of the listener."""
        assert self._listener is not None
        for connection in self._listener.accept_ready():
            try:
                peer = node_of(connection.peer)
                split_node(peer)
            except ConfigError:
                connection.close()
                continue
            with self._guard:
                if self._ended:
                    connection.close()
                else:
                    self._adopt(connection, peer)

    def _poll_link(self, link: int, events: int) -> None:
        """Write and read what one link can, for one turn."""
        with self._guard:
            wire = self._wires.get(link)
            if wire is None:
                return
            try:
                if wire.pending and wire.stream.flush() == 0:
                    wire.pending = False
                    self._written(link, wire, self._clock.now_ns())
            except CommError as exc:
                self._state.link_lost(link, _reason(exc, wire))
            if not wire.pending:
                self._carry(link)
            self._act()
        if not events or events & selectors.EVENT_READ:
            self._read(link, wire)
        self._register(link, wire)

    def _read(self, link: int, wire: _Wire) -> None:
        """Receive frames of one link, for one turn."""
        for _ in range(_FRAMES_PER_TURN):
            with self._guard:
                if not self._state.wants_read(link):
                    return
            try:
                # Without the lock: copying a chunk takes long enough to hold up the others.
                frame = wire.stream.try_recv(partial(self._allocate, link))
                if frame is None:
                    return
                with self._guard:
                    self._state.frame_received(link, frame.meta, self._clock.now_ns())
                    self._act()
            except CommError as exc:
                with self._guard:
                    self._state.link_lost(link, _reason(exc, wire))
                    self._act()
                return
        with self._guard:
            if link in self._wires:
                self._due.add(link)

    def _allocate(self, link: int, meta: bytes, sizes: tuple[int, ...]) -> list[memoryview]:
        with self._guard:
            return list(self._state.allocate(link, meta, sizes, self._clock.now_ns()))

    def _register(self, link: int, wire: _Wire) -> None:
        """Register a link for the events that it waits for."""
        self._close_retired()
        with self._guard:
            if link not in self._wires:
                return
            wanted = {wire.writer: selectors.EVENT_WRITE} if wire.pending else {}
            if self._state.wants_read(link):
                wanted[wire.reader] = wanted.get(wire.reader, 0) | selectors.EVENT_READ
            for fd in wire.registered.keys() - wanted.keys():
                self._selector.unregister(fd)
            for fd, events in wanted.items():
                if fd not in wire.registered:
                    self._selector.register(fd, events, link)
                elif wire.registered[fd] != events:
                    self._selector.modify(fd, events, link)
            wire.registered = wanted


def node_of(peer: Identity) -> str:
    """Return the name of the node that a handshake has proven."""
    return peer.role if peer.rank < 0 else f"{peer.role}:{peer.rank}"


def _reason(exc: CommError, wire: _Wire) -> str:
    """Return how a stream ended, without the words that the van adds itself."""
    text = str(exc).removeprefix(f"lost {wire.stream.peer}: ")
    return text.removesuffix("; look for the first error of that process")
