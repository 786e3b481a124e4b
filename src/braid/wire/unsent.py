"""What a stream has not taken yet: pieces of frames, written as far as the system allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

__all__ = ["Unsent"]

_MAX_PIECES = 512  # per system call; below IOV_MAX, which is 1024 on Linux and macOS


class Unsent:
    """Pieces that wait, in order; not copied.

    Args:
        write: Writes the beginning of some pieces to a descriptor that does not block, and returns
            how many bytes: `socket.sendmsg`, or `os.writev`.

    Attributes:
        nbytes: How much waits.
    """

    def __init__(self, write: Callable[[list[memoryview]], int]) -> None:
        self.nbytes = 0
        self._write = write
        self._pieces: deque[memoryview] = deque()

    def add(self, pieces: Iterable[memoryview]) -> None:
        """Put pieces behind all others."""
        for piece in pieces:
            self._pieces.append(piece)
            self.nbytes += len(piece)

    def drain(self) -> bool:
        """Write until nothing waits (True) or the system takes no more.

        Raises:
            OSError: The stream is broken; nothing waits any more.
        """
        try:
            while self._pieces:
                self._forget(self._write(list(islice(self._pieces, _MAX_PIECES))))
        except BlockingIOError:
            return False
        except OSError:
            self.clear()
            raise
        return True

    def clear(self) -> None:
        """Nothing waits any more."""
        self._pieces.clear()
        self.nbytes = 0

    def _forget(self, nbytes: int) -> None:
        """So many bytes have been written."""
        self.nbytes -= nbytes
        while nbytes:
            piece = self._pieces.popleft()
            if nbytes < len(piece):
                self._pieces.appendleft(piece[nbytes:])
                return
            nbytes -= len(piece)
