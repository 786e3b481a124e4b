"""Types of a van's arguments and results: names of nodes, deliveries, limits and counts."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from braid.errors import ConfigError
from braid.runtime.message.protocol.schema import Message

__all__ = [
    "MAX_CHUNK_BYTES",
    "NUM_PRIORITIES",
    "Allocate",
    "Delivery",
    "VanConfig",
    "VanStatistics",
    "split_node",
]

NUM_PRIORITIES = 16  # each may have one message in progress per link, so they bound the memory
MAX_CHUNK_BYTES = 2 << 20  # a frame of more than half of a `ring` may find no space for good
_NODE = re.compile(r"([a-z][a-z0-9_-]{0,15})(?::(0|[1-9][0-9]{0,8}))?")

Allocate = Callable[[str, Message, tuple[int, ...]], "Sequence[memoryview] | None"]


@functools.lru_cache(maxsize=4096)
def split_node(node: str) -> tuple[str, int]:
    """Split the name of a node into role and rank.

    "worker:3" gives `("worker", 3)`, "launcher" gives `("launcher", -1)`.

    Raises:
        ConfigError: `node` is not a valid name.
    """
    match = _NODE.fullmatch(node)
    if match is None:
        msg = (
            f"{node!r} is not the name of a node such as 'worker:3' or 'launcher': use a role "
            "of at most 16 lower-case letters, digits, - or _, then a colon and a number "
            "unless the role is alone"
        )
        raise ConfigError(msg)
    role, rank = match.groups()
    return role, -1 if rank is None else int(rank)


class Delivery(msgspec.Struct, frozen=True):
    """Message that has arrived.

    Attributes:
        sender: Name of the node that sent the message.
        message: Message of a registered type, or `PeerLost`.
        buffers: Buffers that were sent beside the message, in order; writable.
        id: Number of the message, unique per sender and incarnation; 0 for notices of the van
            itself. A repeated id is the same message sent again.
        incarnation: Number of the sender's life, which changes when it restarts.
        epoch: Membership epoch of the sender when it sent the message.
        priority: Urgency, 0 to 15; more is more urgent.
        answers: Id of the message that this one answers, 0 if none.
    """

    sender: str
    message: Message
    buffers: Sequence[memoryview] = ()
    id: int = 0
    incarnation: int = 0
    epoch: int = 0
    priority: int = 0
    answers: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class VanConfig:
    """Limits and times of a van, which holds the connections of a node.

    Attributes:
        chunk_bytes: Size of the chunks of larger messages; an urgent message waits for one chunk at
            most.
        max_message_bytes: Largest message that this node receives, including buffers.
        max_queue_bytes: Bytes that may wait for one peer at this node before `send` blocks. A
            larger message waits alone.
        max_queue_messages: Messages that may wait for one peer before `send` blocks.
        max_unread_bytes: Bytes from one peer that may wait for `recv` before the van stops reading
            from it.
        max_unread_messages: Messages from one peer that may wait for `recv` before the van stops
            reading from it.
        heartbeat_s: Seconds after which a heartbeat is sent on an idle link.
        lost_after_s: Seconds of silence after which a peer is lost.
        timeout_s: Deadline of calls without a deadline.
        shared_memory: Whether large messages between processes of one host use shared memory, if
            both ends can. Programs pass `not wants_portable()`, see
            `braid.runtime.rendezvous.environment`.
    """

    chunk_bytes: int = 1 << 20
    max_message_bytes: int = 1 << 30
    max_queue_bytes: int = 64 << 20
    max_queue_messages: int = 1024
    max_unread_bytes: int = 64 << 20
    max_unread_messages: int = 1024
    heartbeat_s: float = 1.0
    lost_after_s: float = 30.0
    timeout_s: float = 300.0
    shared_memory: bool = True

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {value:g} (allowed: {low:g} to {high:g})"
            for name, value, low, high in (
                ("chunk_bytes", self.chunk_bytes, 1, MAX_CHUNK_BYTES),
                ("max_message_bytes", self.max_message_bytes, 1, 1 << 50),
                ("max_queue_bytes", self.max_queue_bytes, 1, 1 << 50),
                ("max_queue_messages", self.max_queue_messages, 1, 1 << 30),
                ("max_unread_bytes", self.max_unread_bytes, 1, 1 << 50),
                ("max_unread_messages", self.max_unread_messages, 1, 1 << 30),
                ("heartbeat_s", self.heartbeat_s, 1e-3, 1e6),
                ("lost_after_s", self.lost_after_s, 2 * self.heartbeat_s, 1e7),
                ("timeout_s", self.timeout_s, 1e-3, 1e7),
            )
            if not low <= value <= high
        ]
        if problems:
            msg = f"VanConfig cannot work with {', '.join(problems)}: choose values in range"
            raise ConfigError(msg)


class VanStatistics(NamedTuple):
    """Counts of a van's messages, for one peer or for all.

    Attributes:
        sent: Messages passed to the network completely.
        sent_bytes: Bytes of sent messages, including buffers.
        received: Messages that arrived and were kept.
        received_bytes: Bytes of received messages.
        queued: Messages that wait to be sent now.
        queued_bytes: Bytes of queued messages.
        unread: Messages that arrived and wait for `recv` now.
        expired: Messages not sent because their deadline passed.
        late: Messages dropped at arrival because their deadline had passed.
        stale: Messages dropped because their epoch was over, before sending or at arrival.
        lost: Messages that were queued or in progress when their link broke.
    """

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    queued: int = 0
    queued_bytes: int = 0
    unread: int = 0
    expired: int = 0
    late: int = 0
    stale: int = 0
    lost: int = 0
