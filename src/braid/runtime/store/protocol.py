"""Messages between client and server of a store, in frames of `braid.runtime.wire`.

A small message is sent in the metadata of a frame, a larger one in the frame's only buffer.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from braid.errors import CommError
from braid.runtime.store.store_state import Reply, Request
from braid.runtime.wire import Frame, FrameLimits

__all__ = [
    "STORE_LIMITS",
    "STORE_ROLE",
    "StoreCall",
    "StoreResult",
    "pack",
    "unpack_call",
    "unpack_result",
]

STORE_ROLE = "store"
STORE_LIMITS = FrameLimits(max_buffers=1, max_frame_bytes=256 << 20)


class StoreCall(msgspec.Struct, array_like=True, frozen=True):
    """A client's request to the store, which keeps values by key for all ranks.

    Attributes:
        number: Number that the client gave to the request.
        timeout_ns: Nanoseconds to wait for missing keys.
        request: The request.
    """

    number: int
    timeout_ns: int
    request: Request


class StoreResult(msgspec.Struct, array_like=True, frozen=True):
    """The reply to the call of the same number."""

    number: int
    reply: Reply


M = TypeVar("M")
_CALLS = msgspec.msgpack.Decoder(StoreCall)
_RESULTS = msgspec.msgpack.Decoder(StoreResult)


def pack(message: StoreCall | StoreResult) -> tuple[bytes, list[bytes]]:
    """Return metadata and buffers of the frame that carries `message`."""
    body = msgspec.msgpack.encode(message)
    return (body, []) if len(body) <= STORE_LIMITS.max_meta_bytes else (b"", [body])


def unpack_call(frame: Frame) -> StoreCall:
    """Return the call in `frame`; raises CommError if there is none."""
    return _unpack(frame, _CALLS, "client", "request")


def unpack_result(frame: Frame) -> StoreResult:
    """Return the result in `frame`; raises CommError if there is none."""
    return _unpack(frame, _RESULTS, "server", "reply")


def _unpack(frame: Frame, decoder: msgspec.msgpack.Decoder[M], sender: str, kind: str) -> M:
    try:
        return decoder.decode(frame.buffers[0] if frame.buffers else frame.meta)
    except msgspec.DecodeError as exc:
        msg = (
            f"the {sender} of a store sent a frame that is not a {kind} ({exc}): run the same "
            "version of braid on both"
        )
        raise CommError(msg) from exc
