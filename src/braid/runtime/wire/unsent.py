"""Pieces of frames that a stream has not accepted yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

__all__ = ["Unsent"]

_MAX_PIECES = 512  # per system call; below IOV_MAX, which is 1024 on Linux and macOS


class Unsent:
    """Queue of pieces to write, in order; the pieces are not copied.

    Args:
        write: Function that writes the beginning of a list of pieces to a non-blocking descriptor
            and returns the number of bytes: `socket.sendmsg` or `os.writev`.

    Attributes:
        nbytes: Number of bytes in the queue.
    """

    def __init__(self, write: Callable[[list[memoryview]], int]) -> None:
        self.nbytes = 0
        self._write = write
        self._pieces: deque[memoryview] = deque()

    def drain(self, pieces: Sequence[memoryview] = ()) -> bool:
        """Append pieces; write until the queue is empty (True) or no more is accepted (False).

        Raises:
            OSError: The stream has failed; the pieces are dropped.
        """
        self._pieces.extend(pieces)
        self.nbytes += sum(map(len, pieces))
        try:
            while self._pieces:
                written = self._write(list(islice(self._pieces, _MAX_PIECES)))
                if written == self.nbytes:
                    self._pieces.clear()
                    self.nbytes = 0
                else:
                    self._forget(written)
        except BlockingIOError:
            return False
        except OSError:
            self.clear()
            raise
        return True

    def clear(self) -> None:
        """Drop all pieces."""
        self._pieces.clear()
        self.nbytes = 0

    def _forget(self, nbytes: int) -> None:
        """Remove `nbytes` that have been written."""
        self.nbytes -= nbytes
        while nbytes:
            piece = self._pieces.popleft()
            if nbytes < len(piece):
                self._pieces.appendleft(piece[nbytes:])
                return
            nbytes -= len(piece)
