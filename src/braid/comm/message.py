"""Messages between two members, told apart by tags.

A sender publishes its messages on its line to that receiver, one after the other; two may be under way. A step's slot begins
with an envelope of one cache line:

    word    0      1        2
            tag    bytes    place of the data: 0 for "behind this envelope, the rest in the next steps", else where
                            the receiver can read it itself (shared memory, or private by the kernel)

Small messages are eager: the sender goes on when they are in the slot. Large ones that the receiver reads in place are not:
the sender goes on when the receiver has them. A receiver that wants another tag than that of the next message takes that
message into its inbox, where the receive that wants it will find it, so tags may be received in any order.

Source: MPI 4.0, sec. 3.5 (order of messages), and the eager and rendezvous protocols of every MPI.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

import torch

from braid.comm.channel import Channel, pieces
from braid.errors import MismatchError
from braid.transport import Steps, Wait, WaitAny

__all__ = ["Arrival", "Inbox", "recv", "recv_any", "send"]

CHUNK_BYTES = 256 << 10
ENVELOPE_BYTES = 64
_TAG, _NBYTES, _PLACE = 0, 1, 2
TAG_BIAS = 1 << 62  # tags may be negative, words may not


class Arrival(NamedTuple):
    """A message that came before anyone wanted it.

    Attributes:
        digest: Of its description.
        data: Its bytes.
    """

    digest: int
    data: torch.Tensor


class Inbox:
    """What one source has sent to this rank.

    Args:
        source: Group rank of the sender.
        channel: Its line to this rank.
        acks: This rank's line, on which it acknowledges.
    """

    def __init__(self, source: int, channel: Channel, acks: Channel) -> None:
        self.source = source
        self.channel = channel
        self.acks = acks
        self._early: dict[int, deque[Arrival]] = defaultdict(deque)

    def take(self, tag: int) -> Arrival | None:
        """The oldest message with `tag` that came early."""
        waiting = self._early.get(tag)
        if not waiting:
            return None
        arrival = waiting.popleft()
        if not waiting:
            del self._early[tag]
        return arrival

    def put(self, tag: int, arrival: Arrival) -> None:
        """Keep a message for whoever will want it."""
        self._early[tag].append(arrival)

    def has(self, tag: int) -> bool:
        """Whether a message with `tag` is here, early or next on the line."""
        if self._early.get(tag):
            return True
        ch = self.channel
        value = ch.value + 1
        return ch.counter(self.source) >= value and _envelope(ch, self.source, value)[_TAG] == (
            tag + TAG_BIAS
        )

    def next_wait(self) -> Wait:
        """What to wait for until the next message of this source is there."""
        return Wait(self.source, self.channel.index, self.channel.value + 1)


def send(
    ch: Channel, acks: Channel, x: torch.Tensor, to: int, tag: int, *, private: bool = False
) -> Steps:
    """Send the bytes `x`.

    Args:
        ch: This rank's line to the receiver.
        acks: The receiver's line, on which it acknowledges.
        x: Flat bytes.
        to: Group rank of the receiver.
        tag: Tells it from other messages of this pair.
        private: Let the receiver read private memory.
    """
    yield from acks.await_step(to, ch.value - 1)  # the slot of two steps ago has been read
    place = ch.place(x, private=private) if x.numel() > CHUNK_BYTES else 0
    first = x[:0] if place else x[:CHUNK_BYTES]
    slot = ch.room(ENVELOPE_BYTES + first.numel(), torch.uint8)
    envelope = ch.own_words(3)
    envelope[_TAG], envelope[_NBYTES], envelope[_PLACE] = tag + TAG_BIAS, x.numel(), place
    slot[ENVELOPE_BYTES:].copy_(first)
    value = ch.post()
    if place:
        yield from acks.await_step(to, value)  # the receiver has read it
        return
    for part in pieces(x[CHUNK_BYTES:], CHUNK_BYTES) if x.numel() > CHUNK_BYTES else ():
        yield from acks.await_step(to, ch.value - 1)
        ch.stage(part)
        ch.post()


def recv(inbox: Inbox, x: torch.Tensor, tag: int) -> Steps:
    """Fill the bytes `x` with the next message of `tag` from one source.

    Raises:
        Disagreement: It is described differently.
        MismatchError: It came early, and is described differently.
    """
    ch = inbox.channel
    while True:
        arrival = inbox.take(tag)
        if arrival is not None:
            if arrival.digest != ch.digest:
                raise MismatchError(_other_message(ch, inbox.source, arrival.digest, tag))
            x.copy_(arrival.data)
            return
        value = ch.value + 1
        yield from ch.await_step(inbox.source, value)
        found, _, place = _envelope(ch, inbox.source, value)
        if found == tag + TAG_BIAS:
            ch.value = value  # the sender's step: this rank publishes on `acks` only
            ch.compare(inbox.source, value)
            yield from _take(inbox, x, place)
            return
        yield from _set_aside(inbox)


def recv_any(
    inboxes: list[Inbox], x: torch.Tensor, tag: int, source: list[int], digest: int
) -> Steps:
    """Like `recv`, from whichever source sends first; appends its group rank to `source`."""
    for inbox in inboxes:  # whoever it is, its description is compared with this one
        inbox.channel.digest = digest
    while True:
        for inbox in inboxes:
            if inbox.has(tag):
                source.append(inbox.source)
                yield from recv(inbox, x, tag)
                return
        for inbox in inboxes:  # messages with other tags must not be in the way
            wait = inbox.next_wait()
            if inbox.channel.counter(inbox.source) >= wait.value:
                yield from _set_aside(inbox)
                break
        else:
            yield WaitAny(tuple(inbox.next_wait() for inbox in inboxes))


def _set_aside(inbox: Inbox) -> Steps:
    """Take the message whose envelope has come into the inbox."""
    ch = inbox.channel
    value = ch.value + 1
    found, nbytes, place = _envelope(ch, inbox.source, value)
    ch.value = value
    early = torch.empty(nbytes, dtype=torch.uint8)
    digest = ch.entry(inbox.source, value).digest
    yield from _take(inbox, early, place)
    inbox.put(found - TAG_BIAS, Arrival(digest, early))


def _take(inbox: Inbox, out: torch.Tensor, place: int) -> Steps:
    """Copy a message whose envelope has come, and acknowledge."""
    ch, source = inbox.channel, inbox.source
    if place:
        ch.remote_at(source, place, out.numel(), torch.uint8).read(0, out)
        inbox.acks.post()
        return
    first = out[:CHUNK_BYTES]
    slot = ch.peek(source, ENVELOPE_BYTES + first.numel(), torch.uint8)
    first.copy_(slot[ENVELOPE_BYTES:])
    inbox.acks.post()
    for part in pieces(out[CHUNK_BYTES:], CHUNK_BYTES) if out.numel() > CHUNK_BYTES else ():
        value = ch.value + 1
        yield from ch.await_step(source, value)
        ch.value = value
        part.copy_(ch.peek(source, part.numel(), torch.uint8))
        inbox.acks.post()


def _envelope(ch: Channel, source: int, value: int) -> tuple[int, int, int]:
    words = ch.words_of(source, value, 3)
    return words[_TAG], words[_NBYTES], words[_PLACE]


def _other_message(ch: Channel, source: int, digest: int, tag: int) -> str:
    return (
        f"expected {ch.text_of(ch.rank, ch.digest)} from rank {ch.ranks[source]} with tag {tag}, found that it sent "
        f"{ch.text_of(source, digest)}: make both ends agree on shape and dtype, or use another tag"
    )
