"""Assembly of messages from the frames of one link, received directly into their final memory.

Problem: a receiver that collects chunks and joins them copies every message. A receiver that
trusts a length allocates any size that a stranger requests.

Idea: the head of a message contains all its sizes, which are checked before any allocation. Memory
for the buffers is chosen once, when the message itself is known, so that the program can choose
the memory of a tensor; otherwise it comes from a pool. Each chunk is then received into its slice
of that memory. At most one message per priority is open, so a peer can make this process hold 16 of
the largest size; nothing is allocated for a peer that has not proven the job's secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from braid.errors import CommError
from braid.runtime.memory_pool import MemoryPool
from braid.runtime.message.protocol.heads import (
    Beat,
    Bye,
    Cancel,
    Hello,
    More,
    Open,
    as_bytes,
    unpack,
)
from braid.runtime.message.protocol.schema import Message, Schema
from braid.runtime.message.protocol.vocabulary import Allocate

__all__ = ["Arrived", "Inflow"]

_NOTHING = memoryview(b"")


class Arrived(msgspec.Struct, frozen=True):
    """A message that has arrived completely on a link.

    Attributes:
        head: Description from the sender.
        message: Decoded message.
        buffers: Buffers that were sent beside the message.
        nbytes: Size of the message.
        late: Whether the message's deadline had passed when it arrived.
    """

    head: Open
    message: Message
    buffers: Sequence[memoryview]
    nbytes: int
    late: bool


Event: TypeAlias = Hello | Beat | Bye | Arrived


class _Assembly(msgspec.Struct):
    """Message that has arrived partly."""

    head: Open
    nbytes: int
    deadline_ns: int | None
    body: memoryview
    message: Message | None = None
    buffers: list[memoryview] = []
    missing: list[memoryview] = []  # slices still to fill, in order

    def slices(self, sizes: tuple[int, ...]) -> list[memoryview]:
        """Return the memory for pieces of these sizes; raise ValueError if they do not fit."""
        if self.message is None:
            if len(sizes) != 1 or not 0 < sizes[0] <= len(self.body):
                raise ValueError
            return [self.body[: sizes[0]]]
        if tuple(map(len, self.missing)) == sizes:
            return self.missing
        slices: list[memoryview] = []
        for size, gap in zip(sizes, self.missing, strict=False):
            if not 0 < size <= len(gap) or (size < len(gap) and len(slices) + 1 < len(sizes)):
                raise ValueError
            slices.append(gap[:size])
        if len(slices) < len(sizes):
            raise ValueError
        return slices

    def fill(self, tail: bytes) -> None:
        """Fill all buffers of the message from `tail`, the bytes that were sent in its head."""
        begin = 0
        for gap in self.missing:
            end = begin + len(gap)
            gap[:] = tail[begin:end]
            begin = end
        self.missing = []

    def filled(self, sizes: Sequence[int]) -> None:
        """Record that the slices of `sizes` have been received."""
        if self.message is None:
            self.body = self.body[sizes[0] :]
            return
        last = len(sizes) - 1
        rest = self.missing[last][sizes[last] :]
        self.missing[: last + 1] = [rest] if len(rest) else []


class Inflow:
    """Assembler of the messages that arrive on one link.

    Args:
        peer: Name of the sender, for errors.
        schema: Types of messages.
        max_message_bytes: Largest size of a message that is accepted.
        allocators: Functions that choose the memory for buffers, by type of message.
        pool: Memory for all other buffers.

    On failure: anything but a correct sequence of frames raises CommError; the link must then be
    closed.
    """

    def __init__(
        self,
        peer: str,
        schema: Schema,
        max_message_bytes: int,
        allocators: Mapping[type[Message], Allocate],
        pool: MemoryPool,
    ) -> None:
        self._peer = peer
        self._schema = schema
        self._max_message_bytes = max_message_bytes
        self._allocators = allocators
        self._pool = pool
        self._open: dict[int, _Assembly] = {}
        self._filling: tuple[_Assembly, tuple[int, ...]] | None = None
        self._greeted = False

    def allocate(self, meta: bytes, sizes: tuple[int, ...], now_ns: int) -> Sequence[memoryview]:
        """Return memory of `sizes` bytes for the pieces of a frame that is being received.

        `meta` is the description of the frame, which has arrived already.

        Raises:
            CommError: The frame breaks the protocol; nothing was allocated.
        """
        head = unpack(meta, self._peer)
        if isinstance(head, Open):
            self._begin(head, now_ns)
        elif not isinstance(head, More):
            raise self._broken(f"buffers beside {type(head).__name__}")
        assembly = self._open.get(head.priority)
        if assembly is None:
            raise self._broken(
                f"a later part of a message of priority {head.priority} without its first part"
            )
        try:
            slices = assembly.slices(sizes)
        except ValueError:
            raise self._broken(
                f"pieces of {sizes} bytes that do not fit {assembly.head.name!r}"
            ) from None
        self._filling = assembly, sizes
        return slices

    def received(self, meta: bytes, now_ns: int) -> Event | None:
        """Process a complete frame; return the event that it completes, None for part of a message.

        Raises:
            CommError: The frame breaks the protocol, or its message is not of the schema.
        """
        if self._filling is not None:
            assembly, sizes = self._filling
            self._filling = None
            assembly.filled(sizes)
        else:
            head = unpack(meta, self._peer)
            if not isinstance(head, Open):
                return self._control(head)
            assembly = self._begin(head, now_ns)
            if head.tail:
                assembly.fill(head.tail)
        return self._advance(assembly, now_ns)

    def _control(self, head: Hello | Beat | Bye | Cancel | More) -> Event | None:
        """Process a frame without bytes of a message."""
        if isinstance(head, Hello) == self._greeted:
            when = "twice" if self._greeted else "before Hello"
            raise self._broken(f"{type(head).__name__} {when}")
        if isinstance(head, Cancel):
            if self._open.pop(head.priority, None) is None:
                raise self._broken("the end of a message that is not open")
            return None
        if isinstance(head, More):
            raise self._broken("more of a message without a byte of it")
        if isinstance(head, Hello):
            self._greeted = True
        return head

    def _begin(self, head: Open, now_ns: int) -> _Assembly:
        """Begin a message: check its sizes, then allocate."""
        if not self._greeted:
            raise self._broken("Open before Hello")
        if head.priority in self._open:
            raise self._broken(f"a second open message of priority {head.priority}")
        nbytes = len(head.body) + head.body_bytes + sum(head.sizes)
        if nbytes > self._max_message_bytes:
            raise self._broken(
                f"message {head.name!r} of {nbytes} bytes (limit {self._max_message_bytes})"
            )
        if head.tail and (head.body_bytes or len(head.tail) != sum(head.sizes)):
            raise self._broken(f"a tail of message {head.name!r} that does not fit its buffers")
        if head.body and head.body_bytes:
            raise self._broken(f"two bodies of message {head.name!r}")
        deadline_ns = now_ns + 1000 * head.remaining_us if head.remaining_us else None
        body = self._body_memory(head) if head.body_bytes else _NOTHING
        assembly = _Assembly(head, nbytes, deadline_ns, body)
        if not head.body_bytes:
            self._decode(assembly, head.body)
        self._open[head.priority] = assembly
        return assembly

    def _advance(self, assembly: _Assembly, now_ns: int) -> Arrived | None:
        """Return the message if it is complete."""
        head = assembly.head
        if assembly.message is None:
            if len(assembly.body):
                return None
            self._decode(assembly, memoryview(assembly.body.obj))
        if assembly.missing:
            return None
        del self._open[head.priority]
        assert assembly.message is not None
        late = assembly.deadline_ns is not None and assembly.deadline_ns < now_ns
        return Arrived(head, assembly.message, assembly.buffers, assembly.nbytes, late)

    def _decode(self, assembly: _Assembly, body: bytes | memoryview) -> None:
        """Decode the body, which determines the memory of the buffers."""
        head = assembly.head
        assembly.message = message = self._schema.decode(head.name, body, sender=self._peer)
        if head.sizes:
            assembly.buffers = self._memory(message, head)
            assembly.missing = list(filter(len, assembly.buffers))

    def _memory(self, message: Message, head: Open) -> list[memoryview]:
        sizes = head.sizes
        allocate = self._allocators.get(type(message))
        chosen: list[memoryview] | None = None
        if allocate is not None:
            try:
                returned = allocate(self._peer, message, sizes)
                chosen = None if returned is None else [as_bytes(view) for view in returned]
            except Exception as exc:
                msg = (
                    f"the memory for the buffers of {type(message).__name__} from {self._peer} "
                    "could not be "
                    f"chosen: its receive_into callback raised {type(exc).__name__}: {exc}"
                )
                raise CommError(msg) from exc
        if chosen is None:
            try:
                return list(map(self._pool.lend, sizes))
            except (MemoryError, OSError) as exc:
                raise self._no_memory(head, sum(sizes)) from exc
        chosen_sizes = tuple(map(len, chosen))
        if chosen_sizes != sizes or any(len(view) and view.readonly for view in chosen):
            msg = (
                f"the receive_into callback of {type(message).__name__} must return writable "
                f"memory of {sizes} bytes, got {chosen_sizes}: return one memoryview for each "
                "size"
            )
            raise CommError(msg)
        return chosen

    def _body_memory(self, head: Open) -> memoryview:
        try:
            return memoryview(bytearray(head.body_bytes))
        except MemoryError as exc:
            raise self._no_memory(head, head.body_bytes) from exc

    def _no_memory(self, head: Open, nbytes: int) -> CommError:
        msg = (
            f"not enough memory for {nbytes} bytes of message {head.name!r} from {self._peer}: "
            "send it in parts, or receive_into memory that exists"
        )
        return CommError(msg)

    def _broken(self, problem: str) -> CommError:
        msg = f"{self._peer} does not use the protocol of a braid van: it sent {problem}"
        return CommError(msg)
