"""Message authentication codes of frames between hosts.

Problem: a handshake proves who connects. But an attacker on the network between two hosts can
change, repeat, reorder or drop the bytes that follow.

Idea: each direction of each connection has a key, derived from the secret and from all bytes of the
handshake, and counts its frames. A code covers the number of the frame, its head, and then its
buffers. The code of the head follows the head directly, so the receiver verifies it before it uses
the head or allocates memory.

    | head and meta | code(number, head) | buffer 0 | ... | code(number, head, buffers) |

A frame without buffers ends after the first code. The number is not sent: a frame that is repeated,
or arrives out of order, has the code of another number.

Source: HMAC-SHA256, RFC 2104, with codes of 16 bytes (RFC 2104, section 5). Measured on one
core with SHA instructions: HMAC-SHA256 1.1 GB/s, keyed BLAKE2b 0.6 GB/s, and 1.2 microseconds for
200 bytes from a prepared state.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

__all__ = ["CODE_BYTES", "FrameKeys", "FrameMac"]

CODE_BYTES = 16
# the receiver checks one part while the sender computes the code of the next
_PART_BYTES = 256 << 10
_BLOCK_BYTES = 64  # of SHA-256
_Buffer: TypeAlias = Any


class FrameKeys(NamedTuple):
    """Keys of one connection, from the handshake.

    Attributes:
        sent: Key of the frames that this side sends.
        received: Key of the frames that the peer sends.
    """

    sent: bytes
    received: bytes


class FrameMac:
    """Message authentication codes of the frames of one direction, in order.

    Args:
        key: Key of this direction and connection, 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))
        self._num_frames = 0
        self._frame = self._inner

    def begin(self, head: _Buffer) -> bytes:
        """Begin the next frame; return the code of its head."""
        self._frame = self._inner.copy()
        self._frame.update(self._num_frames.to_bytes(8, "little"))
        self._frame.update(head)
        self._num_frames += 1
        return self.code()

    def update(self, data: _Buffer) -> None:
        """Add the next bytes of the frame's buffers."""
        self._frame.update(data)

    def code(self) -> bytes:
        """Return the code of all data of the frame that has been added."""
        outer = self._outer.copy()
        outer.update(self._frame.digest())
        return outer.digest()[:CODE_BYTES]

    def verify(self, code: _Buffer) -> bool:
        """Return whether `code` is the code of the added data; takes constant time."""
        return hmac.compare_digest(code, self.code())

    def sealed(
        self, pieces: Sequence[memoryview], *, has_buffers: bool
    ) -> Iterator[list[memoryview]]:
        """Yield the pieces of a frame with their codes, in parts that can be sent one by one.

        Args:
            pieces: Pieces that `encode` returned: the head, then the buffers.
            has_buffers: Whether the head lists buffers, empty ones included.
        """
        part, nbytes = [pieces[0], memoryview(self.begin(pieces[0]))], 0
        for piece in pieces[1:]:
            for start in range(0, len(piece), _PART_BYTES):
                view = piece[start : start + _PART_BYTES]
                self.update(view)
                part.append(view)
                nbytes += len(view)
                if nbytes >= _PART_BYTES:
                    yield part
                    part, nbytes = [], 0
        if has_buffers:
            part.append(memoryview(self.code()))
        yield part
