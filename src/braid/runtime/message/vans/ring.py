"""Ring of shared memory in one direction between two processes of a host.

Problem: bytes of a large message pass through the socket in pieces of a few KiB; for each piece the
system allocates memory, updates counters and wakes threads. Shared memory needs none of that, but
requires trust: a peer that shrinks a mapped file kills this process, and a peer that writes a wrong
offset makes it read other memory.

Idea: the ring is an anonymous file, which both ends map. The sender allocates its memory first, and
seals it against changes of its size, which the receiver checks. The sender copies into the ring,
and the receiver copies out of it into the final memory, without the interpreter lock.

    byte   0          64         128                4096                        4096 + RING_BYTES
           | token    | opened   | consumed |       | bytes of frames ...                 |

Neither end sends an offset: both know the position after the last frame, and a frame that would
cross the end begins at the start instead. The receiver writes its position (`consumed`), so the
sender knows the free space without a message. The sender checks that number as well.

The receiver opens the file through `/proc/<pid>/fd/<fd>`, which the system permits to the same user
in one pid namespace. The random token proves that it is the sender's file. A word of `opened` is
the answer; while it is zero, the sender continues without the ring.

Stores of one processor must be seen in order, as on x86; other processors use the socket. Copies
with `pwritev` and `preadv`, which would need no mapping, take 1.5 times as long when both ends run
at the same time, since both change the system's records of the same pages.

Source: L. Lamport, "Proving the Correctness of Multiprocess Programs", 1977: a queue of one writer
and one reader needs no lock. memfd_create(2), fcntl(2) F_ADD_SEALS, proc(5).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Sequence

import numpy as np

from braid.errors import CommError

__all__ = ["RING_BYTES", "ReceiveRing", "SendRing"]

RING_BYTES = 4 << 20  # more pages would not stay in the tables of processors
_HEAD_BYTES = 4096
_TOKEN_BYTES = 16
_OPENED, _CONSUMED = 8, 16  # words, on separate cache lines
_NAME = "braid-van"
_OFFER = struct.Struct(f"<qq{_TOKEN_BYTES}s")  # process, descriptor, token


class _MappedRing:
    """Mapped file of a ring, and the position after the last frame.

    Attributes:
        nbytes: Size of the ring.

    Args:
        fd: Descriptor of the file; owned and closed by this object.
        token: Random bytes at the beginning of the file.
    """

    def __init__(self, fd: int, token: bytes) -> None:
        self.nbytes = RING_BYTES
        self._fd = fd
        self._token = token
        self._position = 0  # only grows; modulo RING_BYTES it is the offset in the ring
        self._map = mmap.mmap(fd, _HEAD_BYTES + RING_BYTES)
        self._words = memoryview(self._map)[:_HEAD_BYTES].cast("Q")

    def close(self) -> None:
        """Close the file and its mapping. Idempotent."""
        if self._fd >= 0:
            self._words.release()
            self._map.close()
            os.close(self._fd)
            self._fd = -1

    def _part(self, place: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return np.frombuffer(self._map, np.uint8, nbytes, _HEAD_BYTES + place)


class SendRing(_MappedRing):
    """Writing end of a ring, the shared memory through which one process sends frames to another.

    Raises:
        OSError: The system refuses anonymous memory.
    """

    def __init__(self) -> None:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            token = os.urandom(_TOKEN_BYTES)
            # if memory were missing later, a signal would end this process
            os.posix_fallocate(fd, 0, _HEAD_BYTES + RING_BYTES)
            os.pwrite(fd, token, 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
            super().__init__(fd, token)
        except BaseException:
            os.close(fd)
            raise

    @property
    def offer(self) -> bytes:
        """Bytes with which the receiver opens the ring's file: process, descriptor and token."""
        return _OFFER.pack(os.getpid(), self._fd, self._token)

    @property
    def is_opened(self) -> bool:
        """Whether the receiver has opened the ring's memory file."""
        return bool(self._words[_OPENED])

    def try_write(self, buffers: Sequence[memoryview], nbytes: int) -> bool:
        """Copy the buffers of a frame into the ring; return False if they do not fit now.

        Raises:
            CommError: The receiver claims to have read bytes that have not been written.
        """
        unread = self._position - self._words[_CONSUMED]
        if not 0 <= unread <= RING_BYTES:
            msg = (
                f"it claims to have read up to byte {self._words[_CONSUMED]} of shared memory, but "
                f"{self._position} were written, into {RING_BYTES}: its memory is damaged"
            )
            raise CommError(msg)
        start = _start(self._position, nbytes)
        if start + nbytes - (self._position - unread) > RING_BYTES:
            return False
        place = start % RING_BYTES
        for buffer in filter(len, buffers):
            size = len(buffer)
            np.copyto(self._part(place, size), np.frombuffer(buffer, np.uint8))
            place += size
        self._position = start + nbytes
        return True


class ReceiveRing(_MappedRing):
    """Reading end of a ring, the shared memory through which one process sends frames to another.

    Args:
        offer: The sender's `SendRing.offer`, which may be wrong.

    Raises:
        OSError: The file does not exist for this process.
        ValueError: The file does not match the offer.
    """

    def __init__(self, offer: bytes) -> None:
        try:
            pid, number, token = _OFFER.unpack(offer)
        except struct.error as exc:
            raise ValueError(str(exc)) from exc
        path = f"/proc/{pid:d}/fd/{number:d}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):  # noqa: PTH115 - not a path
            msg = "another file"  # opening a terminal or a device may have effects
            raise ValueError(msg)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if (
                os.fstat(fd).st_size != _HEAD_BYTES + RING_BYTES
                or os.fstat(fd).st_blocks * 512 < _HEAD_BYTES + RING_BYTES
                or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _seals() != _seals()
                or os.pread(fd, _TOKEN_BYTES, 0) != token
            ):
                msg = "another ring"
                raise ValueError(msg)
            super().__init__(fd, token)
        except BaseException:
            os.close(fd)
            raise
        self._words[_OPENED] = 1

    def read(self, targets: Sequence[memoryview], nbytes: int) -> None:
        """Copy the bytes of the next frame into the targets.

        Args:
            targets: Memory of `nbytes` bytes in total.
            nbytes: Size of the frame, at most `RING_BYTES`.
        """
        start = _start(self._position, nbytes)
        place = start % RING_BYTES
        for target in filter(len, targets):
            size = len(target)
            np.copyto(np.frombuffer(target, np.uint8), self._part(place, size))
            place += size
        self._position = start + nbytes
        self._words[_CONSUMED] = self._position


def _start(position: int, nbytes: int) -> int:
    """Return the start of a frame, so that it does not cross the end of the ring."""
    remaining = RING_BYTES - position % RING_BYTES
    return position if nbytes <= remaining else position + remaining


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
