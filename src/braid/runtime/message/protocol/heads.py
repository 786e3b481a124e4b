"""Heads: the descriptions of all frames that vans send each other.

A frame of `wire` is a description and buffers. The description is one of these heads; the buffers
are the next bytes of a message. A message without buffers is a single `Open`.

    Hello                     first on every link, from both ends
    Open  + first bytes       a message begins
    More  + next bytes        it continues; one message per priority may be open on a link
    Cancel                    the open message of that priority will not be finished
    Beat                      heartbeat of an idle link; also contains the epoch
    Bye                       the van is closed on purpose, or another process has the peer's name
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeAlias

import msgspec

from braid.errors import CommError
from braid.runtime.message.protocol.vocabulary import NUM_PRIORITIES
from braid.runtime.wire import Buffer

__all__ = ["Beat", "Bye", "Cancel", "Head", "Hello", "More", "Open", "as_bytes", "pack", "unpack"]

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Priority = Annotated[int, msgspec.Meta(ge=0, lt=NUM_PRIORITIES)]

# Both fit into the 64 KiB of wire, together with at most 10 KiB of sizes.
INLINE_BODY_BYTES = 32 << 10
TAIL_BYTES = 4 << 10  # a frame with buffers takes a third longer than one without
MAX_BUFFERS = 1000


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """First frame of a link, from both ends.

    Contains the number of the sender's process (incarnation), its epoch, and its message limit.
    """

    incarnation: Count
    epoch: Count
    max_message_bytes: Count


class Open(msgspec.Struct, tag="open", array_like=True):
    """First frame of a message, with its name and sizes.

    Attributes:
        id: Number of the message.
        name: Name of the message's type in the schema.
        priority: Urgency of the message, 0 to 15; more is more urgent.
        epoch: Epoch of the sender when it sent the message.
        answers: Id of the message that this one answers, or 0.
        remaining_us: Microseconds until the message's deadline, 0 for none.
        body: Encoded struct, if it is small.
        body_bytes: Size of a larger encoded struct, which comes before the buffers.
        sizes: Sizes of the buffers.
        tail: Bytes of all buffers, if they are small.
    """

    id: Count
    name: str
    priority: Priority
    epoch: Count
    answers: Count
    remaining_us: Count
    body: bytes
    body_bytes: Count
    sizes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_BUFFERS)]
    tail: bytes = b""

    @property
    def nbytes(self) -> int:
        """Size of body and buffers."""
        return len(self.body) + self.body_bytes + sum(self.sizes)


class More(msgspec.Struct, tag="more", array_like=True, frozen=True):
    """Head of a frame with the next bytes of the message that `Open` of this priority began."""

    priority: Priority


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    """Head that cancels the unfinished message of a priority; the receiver drops the message."""

    priority: Priority


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """Heartbeat on an idle link, with the epoch of the sender."""

    epoch: Count


class Bye(msgspec.Struct, tag="bye", array_like=True, frozen=True):
    """Last frame: the sender closes its van.

    Attributes:
        replaced: Whether the sender closes only this link, because a later process has the name of
            the receiver.
    """

    replaced: bool = False


Head: TypeAlias = Hello | Open | More | Cancel | Beat | Bye

# encodes a head as the description of a frame
pack: Callable[[Head], bytes] = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(
    Hello | Open | More | Cancel | Beat | Bye
)


def unpack(meta: bytes, peer: str) -> Head:
    """Decode the head in `meta`.

    Raises:
        CommError: `meta` is not a head; the message names `peer`.
    """
    try:
        return _decoder.decode(meta)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        msg = (
            f"{peer} does not use the protocol of a braid van: {len(meta)} bytes are not the "
            f"head of a message: {exc}. Install the same version of braid on both"
        )
        raise CommError(msg) from exc


def as_bytes(buffer: Buffer) -> memoryview:
    """Return the bytes of a contiguous buffer, without copying them.

    Raises:
        TypeError: The buffer is not contiguous, or the object is not a buffer.
    """
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")  # empty views cannot be cast
