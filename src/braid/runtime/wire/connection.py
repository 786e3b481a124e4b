"""A connection: frames to and from one peer that has proven its identity.

Problem: blocking sockets can hang without end. The socket module has one time-out for sender and
receiver, which starts again with each partial write. "Connection reset by peer" does not name the
peer.

Idea: the socket never blocks. A thread that must wait polls it until a deadline, and every error
names the peer's rank. Bytes that the kernel does not accept go into an outbox, so one
implementation serves threads that wait (`send`) and event loops that must not (`post`, `flush`).

A peer that ends gives its reason in its last frames, and accepts no more data. A sender may notice
this first. The connection still ends only when those last frames and the end of the stream have
been received.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Sequence

from braid.errors import CommError, CommTimeout, PeerLostError
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.closing import Closing
from braid.runtime.wire.frame_mac import FrameKeys, FrameMac
from braid.runtime.wire.frames import Allocate, Buffer, Frame, FrameDecoder, FrameLimits, encode
from braid.runtime.wire.handshake import Identity
from braid.runtime.wire.unsent import Unsent

__all__ = ["DEFAULT_TIMEOUT_S", "Connection", "is_inside_host"]

DEFAULT_TIMEOUT_S = 300.0
LOST_AFTER_S = 30.0  # silence after which a host counts as lost
# With the system's 208 KiB, both ends of a unix socket sleep after every 208 KiB. TCP adapts its
# buffers itself unless they are set. The system may allow less.
_UNIX_BUFFER_BYTES = 2 << 20


class Connection(Closing):
    """Frames to and from one peer, over a connected stream socket after its handshake.

    Any thread may send; one thread at a time receives. With a selector: a readable `fileno()`
    means that `try_recv()` must be called *until it returns None*, since one read may bring
    several frames.

    Args:
        sock: Connected AF_UNIX or TCP socket; owned and closed by this object.
        peer: Proven identity of the other end.
        limits: Limits of a frame, in both directions.
        keys: Keys of the frames' codes, from the handshake; None for frames without codes.
        clock: Clock for deadlines; the host's when None.
        send_timeout_s: Seconds for which `send` waits for a peer that does not read.

    On failure: if the peer died or closed the connection, `send` raises PeerLostError, and so does
    receiving, after the frames that came before. Frames posted in between are dropped.
    If the peer violates the frame format, CommError is raised once and the connection is closed.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: Identity,
        *,
        limits: FrameLimits | None = None,
        keys: FrameKeys | None = None,
        clock: Clock | None = None,
        send_timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        else:
            # The sender of a small frame waits for its reply; Nagle would delay it by 40 ms.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._peer = peer
        self._limits = limits or FrameLimits()
        self._clock = clock or MonotonicClock()
        self._send_timeout_s = send_timeout_s
        self._mac = None if keys is None else FrameMac(keys.sent)
        received = None if keys is None else FrameMac(keys.received)
        self._decoder = FrameDecoder(self._limits, mac=received)
        self._outbox = Unsent(sock.sendmsg)
        self._send_lock = threading.Lock()
        self._gone: OSError | None = None  # error of sending after which the peer accepts no data
        self._ended = ""  # reason for which the connection is closed

    @property
    def peer(self) -> Identity:
        """Proven identity of the other end."""
        return self._peer

    @property
    def closed(self) -> bool:
        """Whether this connection has ended, for any reason."""
        return bool(self._ended)

    @property
    def is_local(self) -> bool:
        """Whether the other end seems to be on this host, by its address."""
        return is_inside_host(self._socket)

    @property
    def has_codes(self) -> bool:
        """Whether frames carry message authentication codes."""
        return self._mac is not None

    def fileno(self) -> int:
        """Descriptor for a selector, -1 after `close`."""
        return self._socket.fileno()

    def end_if_silent(self, limit_s: float = LOST_AFTER_S) -> None:
        """Make the system end this connection after `limit_s` without an answer of the peer's host.

        The host answers for its processes, so a stopped or busy process does not count as silent. A
        host without power or network counts as silent, also if no data is sent. Without effect on
        sockets other than TCP.
        """
        if self._socket.family == socket.AF_UNIX:
            return
        first_s = max(1, round(limit_s / 2))
        later_s = max(1, round(limit_s / 8))
        options = {
            "TCP_KEEPIDLE": first_s,
            "TCP_KEEPALIVE": first_s,  # the same on macOS
            "TCP_KEEPINTVL": later_s,
            "TCP_KEEPCNT": max(1, round((limit_s - first_s) / later_s)),
            "TCP_USER_TIMEOUT": round(limit_s * 1000),
        }
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    # frames are sent in the order of calls
    def send(self, meta: bytes, buffers: Sequence[Buffer] = (), priority: int = 0) -> None:  # noqa: ARG002
        """Send a frame; returns when the kernel has all its bytes, and the buffers may be reused.

        If two peers both send more than the kernel buffers, and neither receives, both wait until
        the deadline: receive in another thread.

        Args:
            meta: Metadata, at most 64 KiB.
            buffers: Contiguous payloads; not copied in this process.
            priority: Has no effect: frames are sent in the order of the calls; the message layer
                orders them before.

        Raises:
            PeerLostError: The peer is gone.
            CommTimeout: The peer did not read for `send_timeout_s`; the connection is closed, since
                a part of the frame may have been sent.
            ConfigError: The frame exceeds the limits; nothing was sent.
        """
        pieces = encode(meta, buffers, self._limits)
        with self._send_lock:
            is_sent = self._queue(pieces, has_buffers=bool(buffers))
            deadline_ns = self._clock.after_ns(self._send_timeout_s)
            while not is_sent:
                if not self._wait(select.POLLOUT, deadline_ns):
                    self._end("this process gave up sending to it")
                    msg = (
                        f"{self._peer} did not read for {self._send_timeout_s:g} s and its "
                        "buffers are full: it is stopped, stuck, or waits for this process to "
                        "receive"
                    )
                    raise CommTimeout(msg)
                is_sent = self._drain()
            if self._gone is not None:
                raise self._lost_error(self._ended or _broke(self._gone)) from self._gone

    def post(self, meta: bytes, buffers: Sequence[Buffer] = ()) -> int | None:
        """Queue a frame and send what the kernel accepts now; for event loops.

        Do not change the buffers until `flush` returns 0 or None.

        Returns:
            Bytes that are still queued; call `flush` when the socket is writable. None for a peer
            that accepts no more data: the socket is readable, and receiving ends with
            PeerLostError.

        Raises:
            PeerLostError: The connection ended before, or failed for another reason.
        """
        pieces = encode(meta, buffers, self._limits)
        with self._send_lock:
            self._queue(pieces, has_buffers=bool(buffers))
            return self._outbox.nbytes if self._gone is None else None

    def flush(self) -> int | None:
        """Send posted bytes that the kernel accepts now; returns what `post` returns."""
        with self._send_lock:
            self._drain()
            return self._outbox.nbytes if self._gone is None else None

    def recv_into(self, allocate: Allocate | None, timeout_s: float | None = None) -> Frame:
        """Wait for the next frame; its buffers go into the memory that `allocate` returns.

        Args:
            allocate: Function that chooses the memory; see `FrameDecoder.next_frame`.
            timeout_s: Deadline for the whole frame; 300 s when None.

        Raises:
            PeerLostError: The peer is gone.
            CommTimeout: The deadline passed; a later call continues the same frame.
            CommError: The peer sent bytes that are not a frame; the connection is closed.
        """
        frame = self.try_recv(allocate)
        if frame is not None:
            return frame
        timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        deadline_ns = self._clock.after_ns(timeout_s)
        while self._wait(select.POLLIN, deadline_ns):
            frame = self.try_recv(allocate)
            if frame is not None:
                return frame
        arrived = "a part of one" if self._decoder.in_frame else "nothing"
        msg = f"{self._peer} sent no whole message within {timeout_s:g} s: {arrived} has come"
        raise CommTimeout(msg)

    def recv(self, timeout_s: float | None = None) -> Frame:
        """Wait for the next frame, in new memory; see `recv_into`."""
        return self.recv_into(None, timeout_s)

    def try_recv(self, allocate: Allocate | None = None) -> Frame | None:
        """Return the next frame if it has arrived, else None; raises like `recv_into`."""
        decoder = self._decoder
        try:
            while (frame := decoder.next_frame(allocate)) is None:
                if not decoder.read(self._socket.recv_into):
                    raise self._lost(self._gone) from self._gone
        except BlockingIOError:
            return None
        except OSError as exc:
            raise self._lost(exc) from exc
        except CommError as exc:
            self._end(f"it violated the frame format: {exc}")
            self._decoder = FrameDecoder(self._limits)  # bytes that were read ahead are invalid
            raise
        return frame

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait up to `timeout_s`; returns whether a frame or the end of the stream can be read."""
        if self._decoder.has_bytes or self._ended:
            return True
        return self._wait(select.POLLIN, self._clock.after_ns(timeout_s))

    def close(self) -> None:
        """Close the socket; threads that wait in this connection get PeerLostError. Idempotent."""
        self._end("this process closed the connection")

    def __repr__(self) -> str:
        return f"<Connection to {self._peer}{', ended' if self._ended else ''}>"

    def _queue(self, pieces: list[memoryview], *, has_buffers: bool) -> bool:
        """Queue a frame and send, like `_drain`; a frame with codes is sent part by part."""
        if self._mac is None:
            return self._drain(pieces)
        parts = self._mac.sealed(pieces, has_buffers=has_buffers)
        return [self._drain(part) for part in parts][-1]

    def _drain(self, pieces: Sequence[memoryview] = ()) -> bool:
        """Queue pieces, and send until none is left (True) or the kernel accepts no more."""
        if self._gone is not None and not self._ended:
            self._outbox.clear()
            return True
        try:
            return self._outbox.drain(pieces)
        except (BrokenPipeError, ConnectionResetError) as exc:
            # A new object: `exc` refers to the frames of all callers and would keep them alive.
            self._gone = OSError(exc.errno, exc.strerror)
            return True
        except OSError as exc:
            raise self._lost(exc) from exc

    def _wait(self, event: int, deadline_ns: int) -> bool:
        """Wait until the socket is ready for `event`, or has failed; False at the deadline."""
        poll = select.poll()
        fd = self._socket.fileno()
        if fd < 0:
            return True  # closed: the next read or write raises
        poll.register(fd, event)
        remaining_ns = max(0, deadline_ns - self._clock.now_ns())
        return bool(poll.poll(remaining_ns / 1e6))

    def _lost(self, cause: OSError | None) -> PeerLostError:
        """Close the connection; return the error with the reason."""
        if not self._ended:
            reason = "it closed the connection"
            if cause is not None:
                reason = _broke(cause)
            elif self._decoder.in_frame:
                reason = "it closed the connection in the middle of a frame"
            self._end(reason)
        return self._lost_error(self._ended)

    def _lost_error(self, how: str) -> PeerLostError:
        msg = f"lost {self._peer}: {how}; look for the first error of that process"
        return PeerLostError(msg, rank=self._peer.rank)

    def _end(self, why: str) -> None:
        if self._ended:
            return
        self._ended = why
        with contextlib.suppress(OSError):  # the peer may be gone already
            # Wakes threads that poll this descriptor; closing alone would not.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def is_inside_host(sock: socket.socket) -> bool:
    """Return whether both ends of a connected socket seem to be on this host."""
    if sock.family == socket.AF_UNIX:
        return True
    try:
        here, there = sock.getsockname(), sock.getpeername()
    except OSError:  # the peer is gone already
        return False
    return bool(here[0] == there[0])


def _broke(cause: OSError) -> str:
    return f"the connection failed ({cause.strerror or cause})"
