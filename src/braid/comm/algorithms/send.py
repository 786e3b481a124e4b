"""Messages between two members, told apart by tags: the protocol, and the sender's side of it.

A sender publishes its messages on its line to that receiver, one after the other; two may be under
way. The slot of a step begins with an envelope of one cache line:

    word    0      1        2
            tag    bytes    address of the data: 0 for "behind this envelope, the rest in the
                            next steps", else where the receiver can read it (shared memory,
                            or private memory by a copy of the kernel)

Small messages are eager: the sender goes on when they are in the slot. Large ones that the receiver
reads in place are not: the sender goes on when the receiver has them. `receive` has the receiver's
side.

Source: MPI 4.0, sec. 3.5 (order of messages), and the eager and rendezvous protocols of every MPI.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from braid.comm.channel.channel import Channel
from braid.comm.channel.staging import CHUNK_BYTES, pieces
from braid.runtime.transport import Steps

__all__ = ["ENVELOPE_BYTES", "Envelope", "read_envelope", "send"]

EAGER_BYTES = 256 << 10  # messages up to here are not offered for reading in place
ENVELOPE_BYTES = 64
_TAG, _NBYTES, _ADDRESS = 0, 1, 2
TAG_BIAS = 1 << 62  # tags may be negative, words may not


class Envelope(NamedTuple):
    """Description of a message, which its first step carries.

    Attributes:
        tag: Tag, which tells it from other messages of this pair.
        nbytes: Size in bytes.
        address: Address at which the receiver can read it; 0 if it is behind the envelope.
    """

    tag: int
    nbytes: int
    address: int


def send(
    ch: Channel, acks: Channel, x: torch.Tensor, to: int, tag: int, *, private: bool = False
) -> Steps:
    """Send the bytes `x`.

    Args:
        ch: This rank's line to the receiver.
        acks: The receiver's line, on which it acknowledges.
        x: Flat bytes.
        to: Group rank of the receiver.
        tag: Tag, which tells it from other messages of this pair.
        private: Whether the receiver may read private memory.
    """
    yield from acks.await_step(to, ch.value - 1)  # the slot of two steps ago has been read
    address = ch.own.locate(x, private=private) if x.numel() > EAGER_BYTES else 0
    first = x[:0] if address else x[:CHUNK_BYTES]
    slot = ch.own.slot(ENVELOPE_BYTES + first.numel(), torch.uint8)
    envelope = ch.own.words(3)
    envelope[_TAG], envelope[_NBYTES], envelope[_ADDRESS] = tag + TAG_BIAS, x.numel(), address
    slot[ENVELOPE_BYTES:].copy_(first)
    value = ch.publish()
    if address:
        yield from acks.await_step(to, value)  # the receiver has read it
        return
    for part in pieces(x[CHUNK_BYTES:], CHUNK_BYTES) if x.numel() > CHUNK_BYTES else ():
        yield from acks.await_step(to, ch.value - 1)
        ch.own.stage(part)
        ch.publish()


def read_envelope(ch: Channel, source: int, value: int) -> Envelope:
    """Return the envelope that `source` published in step `value` of its line."""
    words = ch.read_words(source, value, 3)
    return Envelope(words[_TAG] - TAG_BIAS, words[_NBYTES], words[_ADDRESS])
