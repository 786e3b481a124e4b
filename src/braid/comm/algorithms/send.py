"""Tagged messages between two members: the protocol, and the sender's side.

A sender publishes its messages in order on its line to that receiver; two steps may be unread. The
slot of a step begins with an envelope of one cache line:

    word    0      1        2
            tag    bytes    address of the data: 0 for "behind this envelope, the rest in the
                            next steps", else where the receiver can read it (shared memory,
                            or private memory by a copy of the kernel)

Small messages are eager: the sender continues once they are in the slot. For large messages that
the receiver reads in place, the sender continues when the receiver has read them. `receive` has the
receiver's side.

Source: MPI 4.0, sec. 3.5 (order of messages), and the eager and rendezvous protocols of every MPI.
"""

from __future__ import annotations

import msgspec
import torch

from braid.comm.channel.channel import Channel
from braid.comm.channel.staging import CHUNK_BYTES, pieces
from braid.runtime.transport import Steps

__all__ = ["EAGER_BYTES", "MessageForm", "first_part", "read_envelope", "send"]

EAGER_BYTES = 256 << 10  # messages up to this size are not offered for reading in place
ENVELOPE_LINES = 1  # addresses count lines of 64 bytes
ENVELOPE_BYTES = 64 * ENVELOPE_LINES
_TAG, _NBYTES, _ADDRESS = 0, 1, 2
TAG_BIAS = 1 << 62  # tags may be negative, words may not
MAX_PLACES = 64  # addresses of slots, and of those that they replaced when they grew


class Envelope(msgspec.Struct, frozen=True):
    """Description of a message, sent in its first step.

    Attributes:
        tag: Tag; messages of one pair with different tags may be received in any order.
        nbytes: Size in bytes.
        address: Address at which the receiver can read it; 0 if it follows the envelope.
    """

    tag: int
    nbytes: int
    address: int


def send(
    ch: Channel, acks: Channel, x: torch.Tensor, to: int, tag: int, *, private: bool = False
) -> Steps:
    """Send the bytes `x`.

    Args:
        ch: Channel on which this rank sends to the receiver.
        acks: Channel on which the receiver acknowledges messages.
        x: Flat bytes.
        to: Group rank of the receiver.
        tag: Tag that the receive must name.
        private: Whether the receiver may read private memory.
    """
    yield from acks.await_step(to, ch.value - 1)  # the slot of two steps ago has been read
    address = ch.own.locate(x, private=private) if x.numel() > EAGER_BYTES else 0
    _stage(ch, x[:0] if address else x[:CHUNK_BYTES], tag, x.numel(), address)
    value = ch.publish()
    if address:
        yield from acks.await_step(to, value)  # the receiver has read it
        return
    for part in pieces(x[CHUNK_BYTES:], CHUNK_BYTES) if x.numel() > CHUNK_BYTES else ():
        yield from acks.await_step(to, ch.value - 1)
        ch.own.stage(part)
        ch.publish()


class MessageForm:
    """Common properties of the messages to or from a member, of one shape and dtype.

    Args:
        channel: Channel on which the messages arrive, or are sent.
        line: Words of the peer: of its messages, or of its acknowledgements. See `Channel.line`.
        peer: Group rank of the other member.
        like: Flat tensor with the dtype.
        shape: Shape.
        text: Description for users.
        digest: Digest of the description, equal on both ends.
    """

    __slots__ = (
        *("channel", "digest", "line", "nbytes", "peer", "text"),
        *("_dtype", "_numel", "_places", "_shape"),
    )

    def __init__(
        self,
        channel: Channel,
        line: memoryview,
        peer: int,
        like: torch.Tensor,
        shape: tuple[int, ...],
        *,
        text: str,
        digest: int,
    ) -> None:
        self.channel = channel
        self.line = line
        self.peer = peer
        self.nbytes = like.nbytes
        self.text = text
        self.digest = digest
        self._dtype, self._numel, self._shape = like.dtype, like.numel(), shape
        self._places: dict[int, tuple[memoryview, torch.Tensor]] = {}

    def write(self, x: torch.Tensor, tag: int) -> None:
        """Write a message into memory of the next step."""
        ch, nbytes = self.channel, self.nbytes
        ch.own.slot(ENVELOPE_BYTES + nbytes, torch.uint8)
        address = ch.own.address
        words, data = self._places.get(address) or self._at(ch.rank, address)
        words[_TAG], words[_NBYTES], words[_ADDRESS] = tag + TAG_BIAS, nbytes, 0
        data.copy_(x)

    def read(self, block: int, x: torch.Tensor, tag: int) -> bool:
        """Copy the peer's message at address `block` to `x`, if it is complete and has this tag."""
        words, data = self._places.get(block) or self._at(self.peer, block)
        if words[_TAG] != tag + TAG_BIAS or words[_NBYTES] != self.nbytes or words[_ADDRESS]:
            return False
        x.copy_(data)
        return True

    def _at(self, member: int, block: int) -> tuple[memoryview, torch.Tensor]:
        """Return the envelope (header) and the data of a message at a new address of a member."""
        if len(self._places) >= MAX_PLACES:
            self._places.clear()
        ch = self.channel
        x = ch.view(member, block + ENVELOPE_LINES, self._numel, self._dtype)
        place = self._places[block] = ch.words(member, block), x.view(self._shape)
        return place


def _stage(ch: Channel, first: torch.Tensor, tag: int, nbytes: int, address: int = 0) -> None:
    """Write a message's envelope (header) and first elements into memory of the next step."""
    ch.own.slot(ENVELOPE_BYTES + first.nbytes, torch.uint8)
    words = ch.words(ch.rank, ch.own.address)
    words[_TAG], words[_NBYTES], words[_ADDRESS] = tag + TAG_BIAS, nbytes, address
    first_part(ch, ch.rank, ch.own.address, first).copy_(first)


def read_envelope(ch: Channel, source: int, block: int) -> Envelope:
    """Return the envelope (header) of a message, at address `block` of member `source`."""
    words = ch.words(source, block)
    return Envelope(words[_TAG] - TAG_BIAS, words[_NBYTES], words[_ADDRESS])


def first_part(ch: Channel, member: int, block: int, like: torch.Tensor) -> torch.Tensor:
    """Return the first elements of a message, which follow its envelope at address `block`."""
    return ch.view(member, block + ENVELOPE_LINES, like.numel(), like.dtype)
