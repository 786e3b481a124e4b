"""Stream of frames with large buffers in shared memory instead of a socket.

Problem: between processes of one host, a socket costs more than the copies that it makes. Shared
memory alone has no order with other messages, does not wake the receiver, and does not show that a
peer has died.

Idea: the socket remains for heads, order, wake-ups and the end of the stream. The buffers of a
large frame go into a ring (see `ring`), and the frame on the socket contains only their sizes.
Buffers that do not fit use the socket: with a full ring, without memory for a ring, or to a peer
that cannot open it. So a peer that does not read slows its sender down in the same way as without a
ring, and no end ever waits for the ring.

    frame on the socket                          meaning
    head | buffers                               an ordinary frame
    IN_RING | count | sizes | head               its buffers are the next bytes of the ring
    OFFER | process, descriptor, token           the sender has made a ring; open it if you can

A head of a van never begins with one of these two numbers. Each direction has a separate ring, made
for the first large frame.
"""

from __future__ import annotations

import contextlib
import platform
import struct
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from braid.errors import CommError
from braid.runtime.wire import MAX_META_BYTES, Allocate, Buffer, Connection, Frame, Identity

if TYPE_CHECKING:
    from braid.runtime.message.vans.ring import ReceiveRing, SendRing

__all__ = ["LEAST_BYTES", "SharedStream", "has_rings"]

LEAST_BYTES = 64 << 10  # below this size, saving a system call beats a cheaper copy
_OFFER, _IN_RING = b"\x01", b"\x02"  # heads are arrays of msgpack, which begin with 0x90 and above
_COUNT = struct.Struct("<H")
_MOST_UNANSWERED = 64  # large frames until a ring is freed that the peer has not opened


def has_rings() -> bool:
    """Return whether this system supports rings, the shared memory for large frames."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


class SharedStream:
    """Frame stream over a connection, with a ring (shared memory) in each direction if possible.

    Args:
        connection: Connection after its handshake; owned and closed by this object.
        enabled: Whether to use shared memory; if not, rings of the peer are not opened.
    """

    def __init__(self, connection: Connection, *, enabled: bool = True) -> None:
        self._connection = connection
        self._enabled = enabled and connection.is_local and has_rings()
        self._outgoing: SendRing | None = None
        self._incoming: ReceiveRing | None = None
        self._num_unanswered = 0

    @property
    def peer(self) -> Identity:
        """Proven identity of the other end."""
        return self._connection.peer

    @property
    def is_shared(self) -> bool:
        """Whether large frames are sent through shared memory."""
        return self._outgoing is not None and self._outgoing.is_opened

    def fileno(self) -> int:
        """Return the descriptor for a selector, -1 after `close`."""
        return self._connection.fileno()

    def post(self, meta: bytes, buffers: Sequence[Buffer] = ()) -> int | None:
        """Queue a frame and write what the socket accepts now; see `Connection.post`.

        Raises:
            PeerLostError: The connection ended before, or broke for another reason.
            CommError: The peer has damaged the shared memory.
        """
        if buffers and self._enabled:
            sizes = [len(buffer) for buffer in buffers]
            if sum(sizes) >= LEAST_BYTES:
                head = _head_in_ring(meta, sizes)
                if len(head) <= MAX_META_BYTES and self._in_ring(buffers, sum(sizes)):
                    return self._connection.post(head)
        return self._connection.post(meta, buffers)

    def flush(self) -> int | None:
        """Write bytes that the socket accepts now; returns what `post` returns."""
        return self._connection.flush()

    def try_recv(self, allocate: Allocate | None = None) -> Frame | None:
        """Return the next frame if it has arrived; else None.

        Raises:
            PeerLostError: The stream has ended.
            CommError: The peer breaks the format of frames, or refers to bytes outside its ring.
        """
        while (frame := self._connection.try_recv(allocate)) is not None:
            kind = frame.meta[:1]
            if frame.buffers or kind not in (_OFFER, _IN_RING):
                return frame
            if kind == _IN_RING:
                return self._from_ring(frame, allocate)
            self._open(frame.meta[1:])
        return None

    def close(self) -> None:
        """Close the connection and the rings. Idempotent."""
        self._connection.close()
        for ring in (self._outgoing, self._incoming):
            if ring is not None:
                ring.close()
        self._outgoing = self._incoming = None
        self._enabled = False

    def __repr__(self) -> str:
        return f"<SharedStream to {self.peer}{', shared' if self.is_shared else ''}>"

    def _in_ring(self, buffers: Sequence[Buffer], nbytes: int) -> bool:
        """Copy the buffers of a frame into the ring, if there is one and they fit."""
        ring = self._outgoing
        if ring is not None and ring.is_opened:
            return ring.try_write(buffers, nbytes)
        self._num_unanswered += 1
        if self._num_unanswered == 1:
            self._offer()
        elif ring is not None and self._num_unanswered > _MOST_UNANSWERED:
            ring.close()
            self._outgoing = None
        return False

    def _offer(self) -> None:
        """Make a ring, and describe it to the peer; frames use the socket until it answers."""
        from braid.runtime.message.vans.ring import SendRing  # noqa: PLC0415 - imports numpy

        with contextlib.suppress(OSError):
            self._outgoing = SendRing()
            self._connection.post(_OFFER + self._outgoing.offer)

    def _open(self, offer: bytes) -> None:
        """Open the ring of the peer, if this process can open it."""
        if self._incoming is not None:
            raise self._broken("a second ring")
        if self._enabled:
            from braid.runtime.message.vans.ring import ReceiveRing  # noqa: PLC0415 - imports numpy

            with contextlib.suppress(OSError, ValueError):
                self._incoming = ReceiveRing(offer)

    def _from_ring(self, frame: Frame, allocate: Allocate | None) -> Frame:
        """Copy the buffers of a frame out of the ring."""
        ring, meta = self._incoming, frame.meta
        if ring is None:
            raise self._broken("a frame in a ring that this process has not opened")
        try:
            (count,) = _COUNT.unpack_from(meta, 1)
            sizes = struct.unpack_from(f"<{count}Q", meta, 1 + _COUNT.size)
        except struct.error:
            raise self._broken("a frame without its sizes") from None
        nbytes = sum(sizes)
        if not 0 < nbytes <= ring.nbytes:
            raise self._broken(f"a frame of {nbytes} bytes in a ring of {ring.nbytes}")
        head = meta[1 + _COUNT.size + 8 * count :]
        if allocate is None:
            targets = [memoryview(bytearray(size)) for size in sizes]
        else:
            targets = list(allocate(head, sizes))
        ring.read(targets, nbytes)
        return Frame(head, targets, frame.is_followed)

    def _broken(self, problem: str) -> CommError:
        msg = f"{self.peer} breaks the rules of shared memory: it sent {problem}"
        return CommError(msg)


def _head_in_ring(meta: bytes, sizes: Sequence[int]) -> bytes:
    return _IN_RING + _COUNT.pack(len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes) + meta
