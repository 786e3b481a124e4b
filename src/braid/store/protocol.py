"""What client and server of a store say to each other, in frames of `braid.wire`.

A message travels in the meta of a frame while it is small, and in the frame's only buffer when it
is not.
"""

from __future__ import annotations

import msgspec

from braid.errors import CommError
from braid.store.store_state import Reply, Request
from braid.wire import Frame, FrameLimits

__all__ = ["STORE_LIMITS", "STORE_ROLE", "Call", "Result", "pack", "unpack_call", "unpack_result"]

STORE_ROLE = "store"
STORE_LIMITS = FrameLimits(max_buffers=1, max_frame_bytes=256 << 20)


class Call(msgspec.Struct, array_like=True, frozen=True):
    """A request of a client.

    Attributes:
        number: The client's name for it.
        timeout_ns: How long to wait for missing keys.
        request: What it asks.
    """

    number: int
    timeout_ns: int
    request: Request


class Result(msgspec.Struct, array_like=True, frozen=True):
    """The reply to the call of that number."""

    number: int
    reply: Reply


_CALLS = msgspec.msgpack.Decoder(Call)
_RESULTS = msgspec.msgpack.Decoder(Result)


def pack(message: Call | Result) -> tuple[bytes, list[bytes]]:
    """Meta and buffers of the frame that carries `message`."""
    body = msgspec.msgpack.encode(message)
    return (body, []) if len(body) <= STORE_LIMITS.max_meta_bytes else (b"", [body])


def unpack_call(frame: Frame) -> Call:
    """The call in `frame`; CommError when there is none."""
    try:
        return _CALLS.decode(_body(frame))
    except msgspec.DecodeError as exc:
        msg = f"expected a store's request, found something else ({exc})"
        raise CommError(msg) from exc


def unpack_result(frame: Frame) -> Result:
    """The result in `frame`; CommError when there is none."""
    try:
        return _RESULTS.decode(_body(frame))
    except msgspec.DecodeError as exc:
        msg = f"expected a store's reply, found something else ({exc})"
        raise CommError(msg) from exc


def _body(frame: Frame) -> bytes | memoryview:
    return frame.buffers[0] if frame.buffers else frame.meta
