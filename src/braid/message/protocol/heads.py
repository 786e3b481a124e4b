"""What vans say to each other: the description of every frame on a link.

A frame of the room `wire` is a description and buffers. The description is one of these heads; the
buffers are the next bytes of a message. A message without buffers is one `Open` and nothing else.

    Hello                     first on every link, from both ends
    Open  + first bytes       a message begins
    More  + next bytes        it goes on; one message per priority may be open on a link
    Cancel                    the open message of that priority will not be finished
    Beat                      nothing to say for a while; also tells the epoch
    Bye                       the van is closed on purpose
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from braid.errors import CommError
from braid.message.protocol.vocabulary import NUM_PRIORITIES
from braid.wire import Buffer

__all__ = ["Beat", "Bye", "Cancel", "Head", "Hello", "More", "Open", "as_bytes", "pack", "unpack"]

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Priority = Annotated[int, msgspec.Meta(ge=0, lt=NUM_PRIORITIES)]

INLINE_BODY_BYTES = 32 << 10  # beside at most 10 KiB of sizes, below the 64 KiB that wire allows
MAX_BUFFERS = 1000


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """Which life of the peer this is, and what it accepts."""

    incarnation: Count
    epoch: Count
    max_message_bytes: Count


class Open(msgspec.Struct, tag="open", array_like=True, frozen=True):
    """A message begins.

    Attributes:
        id: Its number.
        name: Its type in the schema.
        priority: Its lane.
        epoch: The sender's when it was sent.
        answers: Id of the message that it answers, or 0.
        remaining_us: Until its deadline, 0 for none.
        body: The encoded struct, if it is small.
        body_bytes: Otherwise its size; it comes before the buffers.
        sizes: Of the buffers.
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

    @property
    def nbytes(self) -> int:
        """Body and buffers."""
        return len(self.body) + self.body_bytes + sum(self.sizes)


class More(msgspec.Struct, tag="more", array_like=True, frozen=True):
    """The open message of this priority goes on."""

    priority: Priority


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    """The open message of this priority ends unfinished."""

    priority: Priority


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """The sender lives, and is in this epoch."""

    epoch: Count


class Bye(msgspec.Struct, tag="bye", array_like=True, frozen=True):
    """The sender closes its van."""


Head: TypeAlias = Hello | Open | More | Cancel | Beat | Bye

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(
    Hello | Open | More | Cancel | Beat | Bye
)


def pack(head: Head) -> bytes:
    """The description of a frame."""
    return _encoder.encode(head)


def unpack(meta: bytes, peer: str) -> Head:
    """The head in `meta`.

    Raises:
        CommError: There is none; names `peer`.
    """
    try:
        return _decoder.decode(meta)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        msg = f"expected from {peer} the head of a message, found {len(meta)} other bytes: {exc}"
        raise CommError(msg) from exc


def as_bytes(buffer: Buffer) -> memoryview:
    """The bytes of a contiguous buffer, without copying them.

    Raises:
        TypeError: It is not contiguous, or no buffer.
    """
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")  # one without bytes cannot be cast
