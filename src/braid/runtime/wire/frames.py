"""Frames: short metadata and any number of large buffers, which are not copied.

Problem: a stream has no message boundaries. Pickle and length-prefixed blobs copy every tensor once
or twice, and a forged length makes the receiver allocate gigabytes before it has checked the data.

Idea: the head contains all lengths, which are checked against limits before memory is allocated.
Then the receiver chooses the memory for the buffers (`allocate`). The decoder returns the memory
for the next bytes, so the kernel copies a tensor directly from the sender's memory into the
receiver's memory.

    | "BF" | count u16 | meta bytes u32 | count x (buffer bytes u64) | meta | buffer 0 | ...
      ------- 8 bytes, little endian ---

Between hosts, codes follow the head and the buffers (`frame_mac`).

The decoder reads up to 16 KiB ahead when it expects a head, so a small message costs at most one
system call; of a large one at most those 16 KiB are copied.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from braid.errors import CommError, ConfigError
from braid.runtime.wire.frame_mac import CODE_BYTES, FrameMac

__all__ = ["MAX_META_BYTES", "Allocate", "Buffer", "Frame", "FrameDecoder", "FrameLimits", "encode"]

_MARK = int.from_bytes(b"BF", "little")
_HEADER = struct.Struct("<HHI")
_SIZE_BYTES = 8
READ_AHEAD_BYTES = 16 << 10  # several small frames; with more, more of a large frame is copied
MAX_META_BYTES = 64 << 10

# Any contiguous object with the buffer protocol; Python has no type for it before 3.12.
Buffer: TypeAlias = Any
Allocate: TypeAlias = Callable[[bytes, tuple[int, ...]], Sequence[memoryview]]


class Frame(msgspec.Struct):
    """One frame: metadata and buffers that are sent together.

    Attributes:
        meta: Metadata, in a format of the layer above.
        buffers: Payloads, in the memory that `allocate` chose.
        is_followed: Whether bytes after it are in memory already; a selector does not report them.
    """

    meta: bytes
    buffers: list[memoryview]
    is_followed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameLimits:
    """Limits of the memory that a peer can make this process allocate for one frame.

    Attributes:
        max_meta_bytes: Largest metadata, 64 KiB at most.
        max_buffers: Largest number of buffers, 65535 at most.
        max_frame_bytes: Largest sum of metadata and buffers.
    """

    max_meta_bytes: int = MAX_META_BYTES
    max_buffers: int = 1024
    max_frame_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {value} (allowed: {low} to {high})"
            for name, value, low, high in (
                ("max_meta_bytes", self.max_meta_bytes, 0, MAX_META_BYTES),
                ("max_buffers", self.max_buffers, 0, 0xFFFF),
                ("max_frame_bytes", self.max_frame_bytes, 0, 1 << 62),
            )
            if not low <= value <= high
        ]
        if problems:
            msg = f"FrameLimits are out of range: {', '.join(problems)}"
            raise ConfigError(msg)

    def violation(self, meta_bytes: int, num_buffers: int, buffer_bytes: int = 0) -> str | None:
        """Return which limit is exceeded, as in `70000 bytes of meta (limit 65536)`, or None."""
        if meta_bytes > self.max_meta_bytes:
            return f"{meta_bytes} bytes of meta (limit {self.max_meta_bytes})"
        if num_buffers > self.max_buffers:
            return f"{num_buffers} buffers (limit {self.max_buffers})"
        if meta_bytes + buffer_bytes > self.max_frame_bytes:
            return f"{meta_bytes + buffer_bytes} bytes (limit {self.max_frame_bytes})"
        return None


DEFAULT_LIMITS = FrameLimits()


def encode(
    meta: bytes, buffers: Sequence[Buffer] = (), limits: FrameLimits = DEFAULT_LIMITS
) -> list[memoryview]:
    """Return the pieces of a frame in the order in which to send them; the buffers are not copied.

    Args:
        meta: Metadata, at most 64 KiB.
        buffers: Contiguous objects with the buffer protocol; do not change them before they are
            sent.
        limits: Limits of the receiver.

    Raises:
        ConfigError: The receiver would refuse the frame, or a buffer is not contiguous.
    """
    if not buffers and len(meta) <= min(limits.max_meta_bytes, limits.max_frame_bytes):
        return [memoryview(_HEADER.pack(_MARK, 0, len(meta)) + meta)]
    try:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
    except TypeError as exc:
        msg = f"a buffer of a message is not contiguous ({exc}): send a contiguous copy of it"
        raise ConfigError(msg) from exc
    count = len(views)
    sizes = list(map(len, views))
    if violation := limits.violation(len(meta), count, sum(sizes)):
        msg = f"a message to send is too large: {violation}; send it in pieces"
        raise ConfigError(msg)
    head = _HEADER.pack(_MARK, count, len(meta)) + struct.pack(f"<{count}Q", *sizes)
    return [memoryview(head + meta), *filter(len, views)]


class FrameDecoder:
    """Turns a stream of bytes, split anywhere, into frames; does not read a socket itself.

    The caller repeats: `next_frame()`; if that is None, `read()`. After an error the frame
    boundaries are unknown: close the stream.

    Args:
        limits: Limits of a frame; larger frames are refused.
        mac: Checker of the message authentication codes of frames; None for frames without codes.
    """

    def __init__(
        self, limits: FrameLimits = DEFAULT_LIMITS, *, mac: FrameMac | None = None
    ) -> None:
        self._limits = limits
        self._most_meta_bytes = min(limits.max_meta_bytes, limits.max_frame_bytes)
        self._mac = mac
        self._scratch = memoryview(bytearray(READ_AHEAD_BYTES))
        self._begin = 0  # scratch[begin:end] has been read, but not used
        self._end = 0
        self._head_bytes = _HEADER.size  # size of the next head, as far as it is known
        self._meta: bytes | None = None  # None while looking for a head
        self._buffers: list[memoryview] = []
        self._index = 0  # index of the buffer that is being filled
        self._filled = 0

    @property
    def in_frame(self) -> bool:
        """Whether a part of a frame has been read, so that an end of the stream is an error."""
        return self._meta is not None or self._end > self._begin

    @property
    def has_bytes(self) -> bool:
        """Whether bytes have been read that `next_frame` has not processed."""
        return self._meta is None and self._end - self._begin >= self._head_bytes

    def read(self, read_into: Callable[[memoryview], int]) -> int:
        """Read the next bytes of the stream.

        Args:
            read_into: Function that writes bytes to the beginning of a memoryview, which is never
                empty, and returns their number.

        Returns:
            What `read_into` returned.
        """
        if self._meta is not None:
            nbytes = read_into(self._buffers[self._index][self._filled :])
            self._fill(nbytes)
            return nbytes
        if self._begin == self._end:
            self._begin = self._end = 0
        if self._begin + self._head_bytes > len(self._scratch):
            self._make_room()
        nbytes = read_into(self._scratch[self._end :])
        self._end += nbytes
        return nbytes

    def next_frame(self, allocate: Allocate | None = None) -> Frame | None:
        """Return the next whole frame, or None when more bytes are needed.

        Args:
            allocate: Called with the metadata and the sizes of the buffers in bytes, once per frame
                that has buffers; returns writable memory of these sizes. New memory when None.

        Raises:
            CommError: The bytes are not a frame, exceed the limits, or have a wrong code. No memory
                was allocated, unless the code of the buffers is wrong.
            ConfigError: `allocate` returned memory of other sizes.
        """
        if self._meta is None and (
            self._end - self._begin < _HEADER.size or not self._open(allocate or _allocate)
        ):
            return None
        assert self._meta is not None
        while self._index < len(self._buffers):
            target = self._buffers[self._index]
            count = min(len(target) - self._filled, self._end - self._begin)
            if count:
                here = self._scratch[self._begin : self._begin + count]
                target[self._filled : self._filled + count] = here
                self._fill(count)
                self._begin += count
            if self._filled < len(target):
                return None
            self._index += 1
            self._filled = 0
        if self._mac is not None and self._buffers:
            self._verify(self._buffers.pop())
        meta, self._meta = self._meta, None
        self._head_bytes = _HEADER.size
        return Frame(meta, self._buffers, self._end - self._begin >= _HEADER.size)

    def feed(self, data: Buffer, allocate: Allocate | None = None) -> list[Frame]:
        """Return all frames that `data` completes; for callers that already hold the bytes."""
        rest = memoryview(data).cast("B")

        def take(target: memoryview) -> int:
            nonlocal rest
            count = min(len(target), len(rest))
            target[:count] = rest[:count]
            rest = rest[count:]
            return count

        frames = []
        while True:
            while (frame := self.next_frame(allocate)) is not None:
                frames.append(frame)
            if not len(rest):
                return frames
            self.read(take)

    def _open(self, allocate: Allocate) -> bool:
        """Read a head if it has arrived, after its `_HEADER`; prepare for its buffers."""
        begin, have = self._begin, self._end - self._begin
        mark, count, meta_bytes = _HEADER.unpack_from(self._scratch, begin)
        if mark != _MARK:
            head = bytes(self._scratch[self._begin : self._begin + _HEADER.size])
            msg = (
                f"{head!r} is not the head of a frame: close the connection, because frame "
                "boundaries are lost"
            )
            raise CommError(msg)
        code_bytes = 0 if self._mac is None else CODE_BYTES
        self._head_bytes = _HEADER.size + count * _SIZE_BYTES + meta_bytes + code_bytes
        if have < self._head_bytes:
            self._check(meta_bytes, count)  # before memory for the rest of the head is allocated
            return False
        end = begin + self._head_bytes - code_bytes
        if self._mac is not None:
            self._mac.begin(self._scratch[begin:end])
            self._verify(self._scratch[end : end + code_bytes])
        meta = bytes(self._scratch[end - meta_bytes : end])
        sizes: tuple[int, ...] = ()
        if count:
            sizes = struct.unpack_from(f"<{count}Q", self._scratch, begin + _HEADER.size)
        if count or meta_bytes > self._most_meta_bytes:
            self._check(meta_bytes, count, sum(sizes))
        self._buffers = _checked(allocate(meta, sizes), sizes) if count else []
        if self._mac is not None and count:
            self._buffers.append(memoryview(bytearray(CODE_BYTES)))
        self._begin = end + code_bytes
        self._meta = meta
        self._index = self._filled = 0
        return True

    def _fill(self, nbytes: int) -> None:
        """Record that `nbytes` more of the current buffer have arrived."""
        if self._mac is not None and self._index + 1 < len(self._buffers):  # the last one is a code
            self._mac.update(self._buffers[self._index][self._filled : self._filled + nbytes])
        self._filled += nbytes

    def _verify(self, code: memoryview) -> None:
        assert self._mac is not None
        if not self._mac.verify(code):
            msg = (
                "a received message has the wrong authentication code: its bytes changed on the "
                "way, or the sender's program changed a tensor during the send"
            )
            raise CommError(msg)

    def _check(self, meta_bytes: int, count: int, buffer_bytes: int = 0) -> None:
        violation = self._limits.violation(meta_bytes, count, buffer_bytes)
        if violation:
            msg = (
                f"a received message is too large: {violation}; close this connection, and "
                "increase the limits in FrameLimits if such messages are right"
            )
            raise CommError(msg)

    def _make_room(self) -> None:
        """Move the unused bytes to the front of memory that is large enough for the whole head."""
        rest = bytes(self._scratch[self._begin : self._end])
        if self._head_bytes > len(self._scratch):
            self._scratch = memoryview(bytearray(self._head_bytes))
        self._scratch[: len(rest)] = rest
        self._begin, self._end = 0, len(rest)


def _allocate(meta: bytes, sizes: tuple[int, ...]) -> list[memoryview]:  # noqa: ARG001 - Allocate
    return [memoryview(bytearray(size)) for size in sizes]


def _checked(buffers: Sequence[memoryview], sizes: tuple[int, ...]) -> list[memoryview]:
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    returned = tuple(map(len, views))
    if returned != sizes or any([view.readonly for view in views]):  # noqa: C419 - quicker
        msg = (
            f"`allocate` must return writable memory of {sizes} bytes, got {returned}: return "
            "one memoryview per buffer"
        )
        raise ConfigError(msg)
    return views
