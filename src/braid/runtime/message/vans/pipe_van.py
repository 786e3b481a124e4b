"""Van over open streams: the pipes of a child, or a connection that is already trusted.

Problem: a program that starts a process elsewhere (ssh, `ip netns exec`, a batch system) gets its
stdin and stdout, before any network is known. There is no address to connect to, and no handshake.

Idea: the owner of the pipes of a process has started it, or was started by the other end. So a pair
of pipes is a link as soon as it is attached, under a name that its owner chooses. Messages can be
queued before the other end has sent anything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from braid.errors import ConfigError, PeerLostError, RendezvousError
from braid.runtime.message.protocol.van_state import HALF_CLOSED_S
from braid.runtime.message.protocol.vocabulary import split_node
from braid.runtime.message.vans.stream import FrameStream
from braid.runtime.message.vans.stream_van import FRAME_LIMITS, StreamVan
from braid.runtime.wire import Allocate, Buffer, Frame, FrameDecoder, Unsent, encode

__all__ = ["PipeStream", "PipeVan"]


class PipeStream:
    """Frames over a descriptor to read and one to write; a `FrameStream`.

    Args:
        reader: Readable end of a pipe; owned and closed by this object, and made non-blocking.
        writer: Writable end of another pipe; owned and closed by this object, and made
            non-blocking.
        peer: Name of the other end, for errors.
        received: Bytes of frames that were read already, with bytes of another protocol before
            them.
    """

    def __init__(self, reader: int, writer: int, peer: str, *, received: bytes = b"") -> None:
        for fd in (reader, writer):
            os.set_blocking(fd, False)
        self._peer = peer
        self._reader = reader
        self._writer = writer
        self._received = memoryview(received)
        self._decoder = FrameDecoder(FRAME_LIMITS)
        self._outbox = Unsent(lambda pieces: os.writev(self._writer, pieces))

    @property
    def peer(self) -> str:
        """Name of the other end."""
        return self._peer

    def fileno(self) -> int:
        """Return the descriptor to read from; -1 after `close`."""
        return self._reader

    def write_fileno(self) -> int:
        """Return the descriptor to write to; -1 after `close`."""
        return self._writer

    def post(self, meta: bytes, buffers: Sequence[Buffer] = ()) -> int | None:
        """Queue a frame and write what the pipe accepts now.

        Returns:
            Number of bytes still queued; None if the pipe has no reader.

        Raises:
            PeerLostError: The pipe broke for another reason.
        """
        return self.flush(encode(meta, buffers, FRAME_LIMITS))

    def flush(self, pieces: Sequence[memoryview] = ()) -> int | None:
        """Write queued bytes and `pieces` until the pipe is full; returns what `post` returns."""
        try:
            self._outbox.drain(pieces)
        except (BrokenPipeError, ConnectionResetError):
            return None  # `try_recv` reads the last frames, then raises
        except OSError as exc:
            raise self._lost(exc) from exc
        return self._outbox.nbytes

    def try_recv(self, allocate: Allocate | None = None) -> Frame | None:
        """Return the next frame if it has arrived; else None.

        Raises:
            PeerLostError: The stream has ended.
            CommError: The bytes are not a frame.
        """
        decoder = self._decoder
        try:
            while (frame := decoder.next_frame(allocate)) is None:
                if not decoder.read(self._read):
                    raise self._lost(None)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise self._lost(exc) from exc
        frame.is_followed |= bool(self._received)
        return frame

    def close(self) -> None:
        """Close both pipes. Idempotent."""
        for fd in {self._reader, self._writer} - {-1}:
            os.close(fd)
        self._reader = self._writer = -1

    def __repr__(self) -> str:
        return f"<PipeStream to {self._peer}{', closed' if self._reader < 0 else ''}>"

    def _read(self, target: memoryview) -> int:
        if self._received:
            nbytes = min(len(target), len(self._received))
            target[:nbytes] = self._received[:nbytes]
            self._received = self._received[nbytes:]
            return nbytes
        return os.readv(self._reader, [target])

    def _lost(self, cause: OSError | None) -> PeerLostError:
        """Return the error for the end of the stream."""
        reason = "it closed its pipe"
        if cause is not None:
            reason = f"its pipe broke ({cause.strerror or cause})"
        elif self._decoder.in_frame:
            reason = "it closed its pipe in the middle of a frame"
        return PeerLostError(f"lost {self._peer}: {reason}")


class PipeVan(StreamVan):
    """Van (typed messages between named nodes) over pipes and connections that are open already.

    Args:
        node: Name of this node; other ends may use other names for it.
        schema: Messages, the same on all nodes.
        epoch: Membership epoch to begin with.
        config: Limits and times.
        clock: Clock of deadlines, which must advance by itself; None for the host's clock.

    On failure: see `StreamVan`. A peer that is lost can be attached again, over other pipes.
    """

    def attach(self, peer: str, stream: FrameStream) -> None:
        """Register a stream as a link; its other end must be a van of the same schema.

        If a peer of that name accepts nothing more, its last messages are received first, for up to
        a second.

        Args:
            peer: Name for the node at the other end, which may use another name for itself.
                Messages can be sent to it immediately; `PeerLost` reports its end, even if it has
                never sent anything. Until its Hello, this node's limit for the size of messages
                applies.
            stream: A `PipeStream`, or a connection after its handshake; owned and closed by this
                van from now on.

        Raises:
            ConfigError: The name is not valid, or in use; the caller still owns the stream.
            StaleError: The van is closed; the stream has been closed as well.
        """
        split_node(peer)
        until_ns = self._deadline_ns(HALF_CLOSED_S)
        with self._guard:
            self._wait_until(lambda: not self._state.is_ending(peer), until_ns)
            if peer in self._state.peers:
                msg = f"{self.node} already has a link to {peer}: use another name"
                raise ConfigError(msg)
            self._adopt(stream, peer, known=True)

    def connect(self, to: str, address: str = "", *, timeout_s: float | None = None) -> None:  # noqa: ARG002
        """Check that a node is attached; see `Van.connect`.

        Raises:
            RendezvousError: The node is not attached.
        """
        with self._guard:
            self._check_open()
            if to not in self._state.peers:
                attached = ", ".join(self._state.peers) or "no nodes"
                msg = (
                    f"{to} is not attached to {self.node} (attached: {attached}): attach() its "
                    "pipes"
                )
                raise RendezvousError(msg)
