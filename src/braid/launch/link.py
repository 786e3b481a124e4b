r"""The two pipes between a launcher and its agent on another host, as a stream of frames.

Problem: what reaches another host (ssh, `ip netns exec`, a batch system) offers stdin and stdout and nothing else, and the far
shell may print a greeting of its own into the stream before braid speaks. Idea: the agent begins with a line that
nothing else prints, with its version in it; what comes before is kept for the error message, what comes after are frames.

    agent -> launcher    noise ... \0braid-agent 0.1.0\n frame frame ...
    launcher -> agent    frame frame ...

The end of either stream is the end of the other side, however it died: the kernel closes what a process had open.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from itertools import islice

from braid._version import __version__
from braid.errors import PeerLostError
from braid.wire import Buffer, Frame, FrameDecoder, encode

__all__ = ["PipeLink", "first_line"]

MARK = b"\0braid-agent "
MAX_LINE = 64  # a version is shorter
MAX_NOISE = 64 << 10
MAX_PIECES = 512  # per system call; below IOV_MAX


def first_line() -> bytes:
    """What an agent writes before its first frame."""
    return MARK + __version__.encode() + b"\n"


class PipeLink:
    """Frames over a descriptor to read and one to write; never waits.

    Args:
        reader: Readable end of a pipe; owned and closed by this object.
        writer: Writable end of another; owned likewise.
        peer: Who is at the other end, for errors.
        expects_line: Whether the other end begins with `first_line`.

    Attributes:
        version: The other end's braid, once its line has come.
        noise: What came before the line.
    """

    def __init__(self, reader: int, writer: int, peer: str, *, expects_line: bool = False) -> None:
        for fd in (reader, writer):
            os.set_blocking(fd, False)
        self.version = "" if expects_line else __version__
        self.noise = b""
        self._peer = peer
        self._reader = reader
        self._writer = writer
        self._decoder = FrameDecoder()
        self._frames: deque[Frame] = deque()
        self._outbox: deque[memoryview] = deque()

    def fileno(self) -> int:
        """Descriptor to read from; -1 after `close`."""
        return self._reader

    def write_fileno(self) -> int:
        """Descriptor to write to; -1 after `close`."""
        return self._writer

    def post(self, meta: bytes, buffers: Sequence[Buffer] = ()) -> int:
        """Queue a frame and write what the pipe takes now.

        Returns:
            Bytes that are still queued; call `flush` when the descriptor is writable.

        Raises:
            PeerLostError: Nobody reads any more.
        """
        self._outbox.extend(encode(meta, buffers))
        return self.flush()

    def flush(self) -> int:
        """Write what the pipe takes now of what is queued; returns the bytes still queued."""
        outbox = self._outbox
        try:
            while outbox and self._writer >= 0:
                nbytes = os.writev(self._writer, list(islice(outbox, MAX_PIECES)))
                while nbytes:
                    piece = outbox.popleft()
                    if nbytes < len(piece):
                        outbox.appendleft(piece[nbytes:])
                        break
                    nbytes -= len(piece)
        except BlockingIOError:
            pass
        except OSError as exc:
            outbox.clear()
            raise self._lost() from exc
        return sum(map(len, outbox))

    def try_recv(self) -> Frame | None:
        """The next frame if it is here.

        Raises:
            PeerLostError: The stream has ended.
            CommError: What came is no frame.
        """
        if self._reader < 0:
            raise self._lost()
        try:
            while not self.version:
                self._read_line()
            while not self._frames and (frame := self._decoder.next_frame()) is None:
                nbytes = os.readv(self._reader, [self._decoder.next_view()])
                if not nbytes:
                    raise self._lost()
                self._decoder.advance(nbytes)
            return self._frames.popleft() if self._frames else frame
        except BlockingIOError:
            return None
        except OSError as exc:
            raise self._lost() from exc

    def close(self) -> None:
        """Close both pipes. Idempotent."""
        for fd in {self._reader, self._writer} - {-1}:
            os.close(fd)
        self._reader = self._writer = -1

    def _read_line(self) -> None:
        """Look for the first line; what follows it in the same piece is the first frames."""
        chunk = os.read(self._reader, 4096)
        if not chunk:
            raise self._lost()
        self.noise += chunk
        before, mark, after = self.noise.partition(MARK)
        line, newline, rest = after.partition(b"\n")
        if mark and newline and len(line) <= MAX_LINE:
            self.noise, self.version = before, line.decode(errors="replace")
            self._frames.extend(self._decoder.feed(rest))
        elif len(self.noise) > MAX_NOISE + MAX_LINE:
            self.noise = self.noise[-MAX_LINE:]

    def _lost(self) -> PeerLostError:
        return PeerLostError(f"{self._peer} has closed its pipe")
