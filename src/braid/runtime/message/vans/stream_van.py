"""Van over streams: frames are written and read by waiting threads, else by the van's thread.

Problem: threads that send must not wait for each other's peers, and large messages must not delay
small ones, although a stream has one order and a process has one interpreter lock.

Idea: one thread at a time polls all streams, see `poll_turns`: a program's thread while it waits in
the van, and the van's thread while the program does something else. A sending thread also tries to
write immediately, under the van's lock. So a small message and its answer need no switch of
threads. The polling thread writes the rest that the kernel did not accept. A frame leaves the queue
when the previous one is with the kernel, so an urgent message waits for one chunk, and for bytes
that the kernel has already buffered. Buffers go from the sender's memory through the kernel into
the receiver's.

A broken stream is a lost peer until it is connected again: only the callers know what the peer may
have done already. When a write fails, nothing more is written, but the stream is still read, since
it contains the last messages of the peer.

Source: the reactor pattern (D. Schmidt, 1995), with leaders and followers.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from functools import partial

from braid.errors import CommError, ConfigError
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.message.guard import Guard
from braid.runtime.message.protocol.schema import Schema
from braid.runtime.message.protocol.van_state import VanState
from braid.runtime.message.protocol.vocabulary import MAX_CHUNK_BYTES, VanConfig, split_node
from braid.runtime.message.van import Van
from braid.runtime.message.vans.poll_turns import PollTurns
from braid.runtime.message.vans.poller import READABLE, WRITABLE, Looking, Poller
from braid.runtime.message.vans.stream import FrameStream
from braid.runtime.wire import (
    Allocate,
    Connection,
    FrameLimits,
    Identity,
    Listener,
)

__all__ = ["FRAME_LIMITS", "StreamVan", "node_of"]

FRAME_LIMITS = FrameLimits(max_frame_bytes=MAX_CHUNK_BYTES + (64 << 10))
_FRAMES_PER_TURN = 8  # frames of one link before other links, and other users of the lock, get on
_SMALL_BYTES = 4096  # a larger frame is part of a stream of chunks, with the next one arriving soon
_ALL_EVENTS = READABLE | WRITABLE


@dataclass(slots=True, eq=False)
class _Wire:
    """Stream of a link, as the polling thread uses it.

    Attributes:
        stream: The stream.
        reader: Descriptor to read from, kept because the stream drops it at its end.
        writer: Descriptor to write to; equal to `reader`, unless the stream is a pair of pipes.
        allocate: Function that chooses the memory for the buffers of a frame.
        is_gone: Whether the peer accepts nothing more.
        pending: Whether the last frame is not completely with the kernel.
        registered: Events for which the selector polls each descriptor.
        is_reading: Whether `registered` is only reading.
    """

    stream: FrameStream
    reader: int
    writer: int
    allocate: Allocate
    is_gone: bool = False
    pending: bool = False
    registered: dict[int, int] = field(default_factory=dict)
    is_reading: bool = False


class StreamVan(Van):
    """Base class of vans over streams; a thread reads and writes them while no other one waits.

    `SocketVan` and `PipeVan` define how streams are opened.

    Args:
        node: Name of this node.
        schema: Messages, the same on all nodes.
        listener: Listener for connections of other nodes; owned and closed by this object.
        epoch: Membership epoch to begin with.
        config: Limits and times.
        clock: Clock of deadlines, which must advance by itself; None for the host's clock.

    On failure: a peer is lost immediately when its process ends. If it is stopped, or its host or
    network is gone, it is lost after `lost_after_s` of silence. A frame must also arrive within
    that time: a peer slower than one chunk in it is lost. While this node does not read from a
    peer, the peer's silence is ignored.
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
        # the wall clock, so that a later life has another number; it is not used for measurements
        state = VanState(
            node, schema, config or VanConfig(), incarnation=time.time_ns(), epoch=epoch
        )
        super().__init__(state, schema, clock, Guard())
        self._listener = listener
        self._numbers = itertools.count(1)
        self._wires: dict[int, _Wire] = {}
        self._link_of: dict[int, int] = {}  # by polled descriptor
        self._retired: list[_Wire] = []  # to be closed by the polling thread
        self._due: set[int] = set()  # links to poll even if nothing is readable
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._poller = Poller()
        self._poller.register(self._wake_reader.fileno(), READABLE)
        if self._listener is not None:
            self._poller.register(self._listener.fileno(), READABLE)
        self._looking = Looking(self._poller)
        self._turns = PollTurns(self._guard, self._interrupt)
        _VANS.add(self)
        # daemon, so that a program that forgets to close the van can still end
        name = f"braid-message-{node}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def rouse(self) -> None:
        """End one `recv` early; see `Van.rouse`."""
        with self._lock:
            super().rouse()
            if self._turns.is_taken:
                self._interrupt()

    def _wait(self, deadline_ns: int) -> bool:
        """Poll the streams once, or wait while another thread does; see `Van._wait`."""
        remaining_ns = deadline_ns - self.clock.now_ns()
        if remaining_ns <= 0:
            return False
        if not self._turns.begin():
            self._turns.follow(remaining_ns / 1e9)
            return True
        self._lock.release()
        try:
            self._poll(deadline_ns)
        finally:
            self._lock.acquire()
            self._turns.end(hand_over=self._signal is not None)
        return True

    def _stream(self, connection: Connection) -> FrameStream:
        """Return the stream of a connection that the listener has accepted."""
        return connection

    def _cut(self, link: int) -> None:
        wire = self._wires.pop(link)
        self._due.discard(link)
        self._retired.append(wire)
        self._turns.wake()

    def _read_again(self, link: int) -> None:
        self._schedule(link)

    def _release(self) -> None:
        with self._guard:
            self._turns.stop()
        self._thread.join()
        with self._guard:
            while self._turns.is_taken:  # a waiting thread raises StaleError
                self._interrupt()
                self._turns.follow(1.0)
            self._close_retired()
            self._turns.close()
        if self._listener is not None:
            self._listener.close()
        self._poller.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def disown(self) -> None:
        """Make every later call raise; for a forked child, since the parent owns the van.

        Nothing is written, and no connection is closed.
        """
        self._guard = Guard()  # another thread may have held the lock
        self._lock = self._guard.lock
        self._is_closed = True
        self._ended = (
            f"the van of {self.node} belongs to the parent of this process: open a new one"
        )

    def _adopt(self, stream: FrameStream, peer: str, *, known: bool = False) -> int:
        """Register a stream as link to the proven identity `peer`; the caller holds the guard."""
        if self._ended:
            stream.close()
        self._check_open()
        link = next(self._numbers)
        reader = stream.fileno()
        writer = getattr(stream, "write_fileno", stream.fileno)()
        self._wires[link] = _Wire(stream, reader, writer, partial(self._allocate, link))
        self._state.link_up(link, peer, self.clock.now_ns(), known=known)
        self._schedule(link)
        self._act()
        return link

    def _schedule(self, link: int) -> None:
        """Make the polling thread check a link; the caller holds the guard."""
        self._due.add(link)
        self._turns.wake()

    def _interrupt(self) -> None:
        # if the pipe is full, the thread will wake in any case; if closed, the thread has ended
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"w")

    def _carry(self, link: int) -> None:
        """Write frames until the kernel accepts no more, or the turn is over. In any thread."""
        wire = self._wires.get(link)
        if wire is None or wire.is_gone:
            return
        if wire.pending:
            self._turns.wake()  # a queued message may have a deadline unknown to the poller
            return
        now_ns = self.clock.now_ns()
        try:
            for _ in range(_FRAMES_PER_TURN):
                frame = self._state.next_frame(link, now_ns)
                if frame is None:
                    return
                queued = wire.stream.post(frame.meta, frame.pieces)
                wire.pending = bool(queued)
                if queued:
                    break
                if queued is None:
                    self._half_close(link, wire, now_ns)
                    return
                if not self._state.frame_sent(link, now_ns):
                    return
        except CommError as exc:
            self._state.link_lost(link, _reason(exc, wire))
            return
        self._schedule(link)

    def _half_close(self, link: int, wire: _Wire, now_ns: int) -> None:
        """Record that the peer accepts nothing more; its last messages are still read."""
        wire.is_gone = True
        self._state.link_half_closed(link, "it accepts nothing more", now_ns)
        self._schedule(link)

    # -- polling, in the thread that has the turn

    def _run(self) -> None:
        """Poll while no other thread does; in the van's thread."""
        try:
            while True:
                with self._guard:
                    if not self._turns.begin_own():
                        return
                self._poll(None)
        finally:
            with self._guard:  # even after an error, no thread may wait for this one
                self._ended = self._ended or f"the thread of the van of {self.node} has failed"
                self._state.close()
                self._act()
                if self._turns.is_mine:  # an error has ended the poll
                    self._close_retired()
                    self._turns.end(hand_over=False)
                self._turns.stop()

    def _poll(self, until_ns: int | None) -> None:
        """Write and read on ready streams, waiting for them until `until_ns` at most.

        Timers that become due during the wait are run by the next poll: otherwise a process that
        was stopped would declare peers lost without having read from them.
        """
        if self._retired:
            self._close_retired()
        polled_ns = self.clock.now_ns()
        with self._lock:
            due_ns = self._state.next_deadline_ns()
        accept_ns = None if self._listener is None else self._listener.next_deadline_ns()
        if accept_ns is not None and (due_ns is None or accept_ns < due_ns):
            due_ns = accept_ns
        is_first = until_ns is None or (due_ns is not None and due_ns < until_ns)
        first_ns = due_ns if is_first else until_ns
        pause_s = None if first_ns is None else max(0, first_ns - polled_ns) / 1e9
        # the van's thread leaves the core to the program
        wait = self._poller.wait if until_ns is None else self._looking.wait
        for fd, events in wait(0 if self._due else pause_s):
            link = self._link_of.get(fd)
            if link is not None:
                self._poll_link(link, events)
            elif fd == self._wake_reader.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._wake_reader.recv(4096)
            elif self._listener is not None and fd == self._listener.fileno():
                self._accept()
        if self._due:
            with self._guard:
                due, self._due = self._due, set()
            for link in due:
                self._poll_link(link, _ALL_EVENTS)
        if due_ns is not None and due_ns <= polled_ns:
            self._tick(polled_ns)

    def _tick(self, now_ns: int) -> None:
        """Run the timers that were due before the last poll of the streams."""
        if self._listener is not None:
            overdue_ns = self._listener.next_deadline_ns()
            if overdue_ns is not None and overdue_ns <= now_ns:
                self._accept()
        with self._lock:
            self._tick_if_due(now_ns)

    def _close_retired(self) -> None:
        """Close the streams of removed links.

        Descriptor numbers are reused, so this must come before new ones are registered.
        """
        with self._lock:
            retired, self._retired = self._retired, []
            for wire in retired:
                for fd in wire.registered:
                    self._forget(fd)
                wire.stream.close()

    def _forget(self, fd: int) -> None:
        self._poller.unregister(fd)
        del self._link_of[fd]

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
                    self._adopt(self._stream(connection), peer)

    def _poll_link(self, link: int, events: int) -> None:
        """Write and read on one ready link, for one turn."""
        wire = self._wires.get(link)
        if wire is None:
            return
        if events & ~READABLE:  # including errors
            self._write(link, wire)
        if events & ~WRITABLE:
            try:
                self._read(link, wire)
            except BaseException:  # such as KeyboardInterrupt, in a thread of the program
                with self._lock:
                    self._state.link_lost(link, f"{self.node} was interrupted while it read")
                    self._act()
                raise
        if not wire.is_reading or wire.pending or not self._state.wants_read(link):
            self._register(link, wire)

    def _write(self, link: int, wire: _Wire) -> None:
        """Write the rest of the last frame, and the next ones."""
        with self._lock:
            try:
                if wire.pending and not (queued := wire.stream.flush()):
                    wire.pending = False
                    if queued is None:
                        self._half_close(link, wire, self.clock.now_ns())
                    else:
                        self._state.frame_sent(link, self.clock.now_ns())
            except CommError as exc:
                self._state.link_lost(link, _reason(exc, wire))
            if not wire.pending:
                self._carry(link)
            self._act()

    def _read(self, link: int, wire: _Wire) -> None:
        """Receive frames of one link, for one turn."""
        for _ in range(_FRAMES_PER_TURN):
            if not self._state.wants_read(link):
                return
            try:
                # without the lock, since copying a chunk takes long
                frame = wire.stream.try_recv(wire.allocate)
                if frame is None:
                    return
                with self._lock:
                    self._state.frame_received(link, frame.meta, self.clock.now_ns())
                    self._act()
            except CommError as exc:
                with self._lock:
                    self._state.link_lost(link, _reason(exc, wire))
                    self._act()
                return
            if not frame.is_followed and sum(map(len, frame.buffers)) < _SMALL_BYTES:
                return  # the selector will show the next frame
        with self._lock:
            if link in self._wires:
                self._due.add(link)

    def _allocate(self, link: int, meta: bytes, sizes: tuple[int, ...]) -> list[memoryview]:
        with self._lock:
            return list(self._state.allocate(link, meta, sizes, self.clock.now_ns()))

    def _register(self, link: int, wire: _Wire) -> None:
        """Register a link for the events that it waits for."""
        self._close_retired()
        with self._lock:
            if link not in self._wires:
                return
            wanted = {wire.writer: WRITABLE} if wire.pending else {}
            if self._state.wants_read(link):
                wanted[wire.reader] = wanted.get(wire.reader, 0) | READABLE
            if wanted == wire.registered:
                return
            for fd in wire.registered.keys() - wanted.keys():
                self._forget(fd)
            for fd, events in wanted.items():
                if fd not in wire.registered:
                    self._poller.register(fd, events)
                    self._link_of[fd] = link
                elif wire.registered[fd] != events:
                    self._poller.modify(fd, events)
            wire.registered = wanted
            wire.is_reading = wanted == {wire.reader: READABLE}


_VANS: weakref.WeakSet[StreamVan] = weakref.WeakSet()


def _note_fork() -> None:
    """Disable the parent's vans in a forked process: their streams belong to the parent."""
    for van in _VANS:
        van.disown()


os.register_at_fork(after_in_child=_note_fork)


def node_of(peer: Identity) -> str:
    """Return the node name of an identity that a handshake has proven."""
    return peer.role if peer.rank < 0 else f"{peer.role}:{peer.rank}"


def _reason(exc: CommError, wire: _Wire) -> str:
    """Return how a stream ended, without the words that the van adds itself."""
    text = str(exc).removeprefix(f"lost {wire.stream.peer}: ")
    return text.removesuffix("; look for the first error of that process")
