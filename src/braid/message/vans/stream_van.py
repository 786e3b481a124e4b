"""A van over streams: one thread that writes and reads frames, whatever the streams are made of.

Problem: threads that send must not wait for each other's peers, and large messages must not hold up
small ones, though a stream has one order and a process has one interpreter lock.

Idea: one thread waits for all streams. Whoever sends also tries at once to write, under the van's
lock, so a small message costs one system call and no change of threads; what the kernel does not
take is written by the thread. A frame leaves the queue when the one before it is with the kernel,
so an urgent message waits for one chunk, and for what the kernel has already buffered. Buffers go
from the sender's memory through the kernel into the receiver's.

A broken stream is a lost peer, and stays one until it is connected again: only the layers above
know what the peer may have done already. When writing shows it, nothing more is written, and the
stream is read on: what the peer has said last lies there.

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
_FRAMES_PER_TURN = 8  # of one link, before the others have theirs and the lock is free again


class Stream(Protocol):
    """Carries frames and never waits: a `SocketConnection`, or a `PipeStream`."""

    @property
    def peer(self) -> object:
        """Who is at the other end, as its errors say it."""
        ...

    @property
    def gone(self) -> bool:
        """Whether writing has shown that the peer takes nothing more."""
        ...

    def fileno(self) -> int:
        """Descriptor to read from."""
        ...

    def post(self, meta: bytes, buffers: Sequence[Buffer] = ()) -> int:
        """Queue a frame and write what the kernel takes now; returns the bytes still queued, 0 for a peer that has gone."""
        ...

    def flush(self) -> int:
        """Write what the kernel takes now; returns the bytes still queued."""
        ...

    def try_recv(self, allocate: Allocate | None = None) -> Frame | None:
        """The next frame if it is here."""
        ...

    def close(self) -> None:
        """Close it. Idempotent."""
        ...


@dataclass(slots=True, eq=False)
class _Wire:
    """A stream, and what the thread knows of it."""

    stream: Stream
    reader: int  # the stream forgets its own when it ends
    writer: int  # the same, unless it is a pair of pipes
    pending: bool = False  # the last frame is not yet with the kernel
    watched: dict[int, int] = field(default_factory=dict)  # events that are registered


class StreamVan(Van):
    """What `SocketVan` and `PipeVan` share: all but how streams come to be.

    Args:
        node: Own name.
        schema: The messages, the same on all nodes.
        listener: Where others come in; owned and closed by this object.
        epoch: Membership epoch to begin with.
        config: Limits and times.
        clock: Must move by itself; the host's when None.

    On failure: a peer whose process ends is lost at once; one that is stopped, or whose host or
    network is gone, after `lost_after_s` of silence. A frame must arrive within that time, too: a
    peer slower than one chunk in it is lost. While this node does not read from a peer, it does not
    judge its silence.
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
        self._restless: set[int] = set()  # links that need the thread though nothing is readable
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
        self._restless.discard(link)
        self._retired.append(wire)
        self._wake()

    def _read_again(self, link: int) -> None:
        self._rouse(link)

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
        """Make a link of a stream whose other end is trusted to be `peer`; with the guard held."""
        if self._ended:
            stream.close()
        self._check_open()
        link = next(self._numbers)
        reader = stream.fileno()
        writer = getattr(stream, "write_fileno", stream.fileno)()
        self._wires[link] = _Wire(stream, reader, writer)
        self._state.link_up(link, peer, self._clock.now_ns(), known=known)
        self._rouse(link)
        self._act()
        return link

    def _rouse(self, link: int) -> None:
        """Let the thread look after a link; with the guard held."""
        self._restless.add(link)
        self._wake()

    def _wake(self) -> None:
        if threading.current_thread() is self._thread:
            return
        # A full pipe means that it will wake anyway; a closed one, that there is nothing to wake.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"w")

    def _carry(self, link: int) -> None:
        """Write frames until the kernel takes no more, or the turn is over; with the guard held, in any thread."""
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
        self._rouse(link)

    def _written(self, link: int, wire: _Wire, now_ns: int) -> bool:
        """All of a frame is with the kernel, or dropped; whether the peer takes more; with the guard held."""
        if wire.stream.gone:
            self._state.link_half_closed(link, "it accepts nothing more", now_ns)
            return False
        self._state.frame_sent(link, now_ns)
        return True

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._tidy()
                looked_ns = self._clock.now_ns()
                for key, events in self._selector.select(self._pause_s()):
                    if key.fileobj is self._wake_reader:
                        with contextlib.suppress(BlockingIOError):
                            self._wake_reader.recv(4096)
                    elif key.fileobj is self._listener:
                        self._welcome()
                    else:
                        self._poll_link(key.data, events)
                with self._guard:
                    restless, self._restless = self._restless, set()
                for link in restless:
                    self._poll_link(link, 0)
                self._pass_time(looked_ns)
        finally:
            with self._guard:  # whatever happened, nobody waits for a thread that is gone
                self._ended = self._ended or f"the thread of the van of {self.node} has failed"
                self._state.close()
                self._act()
            self._tidy()

    def _pause_s(self) -> float | None:
        """How long nothing needs to be done unless a socket is ready."""
        with self._guard:
            if self._restless:
                return 0
            deadlines = [self._state.next_deadline_ns()]
        if self._listener is not None:
            deadlines.append(self._listener.next_deadline_ns())
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0, min(known) - self._clock.now_ns()) / 1e9 if known else None

    def _pass_time(self, now_ns: int) -> None:
        """Do what was due before the last look at the streams.

        Not what is due by now: a process that was stopped would take others for silent that it has
        not listened to.
        """
        if self._listener is not None:
            overdue_ns = self._listener.next_deadline_ns()
            if overdue_ns is not None and overdue_ns <= now_ns:
                self._welcome()
        with self._guard:
            self._tick_if_due(now_ns)

    def _tidy(self) -> None:
        """Close what the state has given up. Descriptors are used again, so this comes before new ones are watched."""
        with self._guard:
            retired, self._retired = self._retired, []
            for wire in retired:
                for fd in wire.watched:
                    self._selector.unregister(fd)
                wire.stream.close()

    def _welcome(self) -> None:
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
        self._watch(link, wire)

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
                self._restless.add(link)

    def _allocate(self, link: int, meta: bytes, sizes: tuple[int, ...]) -> list[memoryview]:
        with self._guard:
            return list(self._state.allocate(link, meta, sizes, self._clock.now_ns()))

    def _watch(self, link: int, wire: _Wire) -> None:
        """Register for what this link waits for."""
        self._tidy()
        with self._guard:
            if link not in self._wires:
                return
            wanted = {wire.writer: selectors.EVENT_WRITE} if wire.pending else {}
            if self._state.wants_read(link):
                wanted[wire.reader] = wanted.get(wire.reader, 0) | selectors.EVENT_READ
            for fd in wire.watched.keys() - wanted.keys():
                self._selector.unregister(fd)
            for fd, events in wanted.items():
                if fd not in wire.watched:
                    self._selector.register(fd, events, link)
                elif wire.watched[fd] != events:
                    self._selector.modify(fd, events, link)
            wire.watched = wanted


def node_of(peer: Identity) -> str:
    """The node that a handshake has proven."""
    return peer.role if peer.rank < 0 else f"{peer.role}:{peer.rank}"


def _reason(exc: CommError, wire: _Wire) -> str:
    """What happened to a stream, without the words that the van adds itself."""
    text = str(exc).removeprefix(f"lost {wire.stream.peer}: ")
    return text.removesuffix("; look for the first error of that process")
