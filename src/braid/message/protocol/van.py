"""A van carries typed messages between named nodes.

Problem: not everything that processes tell each other is a collective. Launcher services, parameter
servers, remote calls and pipelines across hosts send single messages to single peers, of a few
bytes or of gigabytes, some of which must not wait behind others. Each such system usually brings
its own sockets, its own queue and its own idea of a lost peer.

Idea: one face, `Van`, with four implementations that share one state machine (`van_state`): sockets
and pipes for programs, one process for tests of programs, and a simulated network with faults and a
virtual clock for tests of protocols.

What is promised
* A message arrives whole or not at all, at most once, and is of a registered type. (A simulated
  network can be told to duplicate.)
* Messages of one sender and one priority arrive in the order in which they were sent. Of those that
  wait at the sender, the more urgent leaves first; a large one leaves in chunks, between which more
  urgent ones pass.
* Who does not read slows down who sends to it, and nobody else.
* A peer that is gone is noticed: at once when its process ends, after `lost_after_s` of silence
  otherwise. What it has sent, and the notice of its loss, comes before anything that its next life
  says.

What is not promised
* Delivery. When a link breaks, what was on it is lost, and the van neither resends nor reconnects:
  it cannot know whether the peer acted already. Layers above send again under the same message id,
  and the receiver drops what it has seen; `services` does that.

Source: the Van of PS-Lite (M. Li et al., "Scaling Distributed Machine Learning with the Parameter
Server", OSDI 2014), with FIFO among equal priorities, deadlines, types and authentication, which
that one lacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from braid.clock import Clock
from braid.errors import ConfigError
from braid.message.protocol.schema import Message
from braid.wire import Buffer

__all__ = [
    "MAX_CHUNK_BYTES",
    "NUM_PRIORITIES",
    "Allocate",
    "Delivery",
    "Sending",
    "Van",
    "VanConfig",
    "VanStatistics",
    "split_node",
]

NUM_PRIORITIES = 16  # each may have one message under way on a link, so they bound the memory
MAX_CHUNK_BYTES = 4 << 20
_NODE = re.compile(r"([a-z][a-z0-9_-]{0,15})(?::(0|[1-9][0-9]{0,8}))?")

Allocate = Callable[[str, Message, tuple[int, ...]], "Sequence[memoryview] | None"]


def split_node(node: str) -> tuple[str, int]:
    """Role and rank of a node: `("worker", 3)` of "worker:3", `("launcher", -1)` of "launcher".

    Raises:
        ConfigError: `node` is no such name.
    """
    found = _NODE.fullmatch(node)
    if found is None:
        msg = (
            f"expected the name of a node such as 'worker:3' or 'launcher', found {node!r}: a "
            "role of at "
            "most 16 lower-case letters, digits, - or _, then a colon and a number unless it is "
            "alone"
        )
        raise ConfigError(msg)
    role, rank = found.groups()
    return role, -1 if rank is None else int(rank)


class Delivery(NamedTuple):
    """A message that has arrived.

    Attributes:
        sender: Name of the node that sent it.
        message: A registered type, or `PeerLost`.
        buffers: What was sent beside it, in order; writable.
        id: Number of the message, unique per sender and incarnation; 0 for a van's own notices. The
            same id again is the same message sent again.
        incarnation: Which life of the sender: changes when it restarts.
        epoch: The sender's membership epoch when it sent this.
        priority: 0 to 15; more is more urgent.
        answers: Id of the message that this answers, 0 if none.
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
    """How a van behaves.

    Attributes:
        chunk_bytes: Larger messages leave in chunks of this size; an urgent message waits for one
            of them at most.
        max_message_bytes: Largest message that this node receives, buffers included.
        max_queue_bytes: What may wait for one peer at this node before `send` blocks. A larger
            message waits alone.
        max_queue_messages: Likewise, in messages.
        max_unread_bytes: What one peer may have delivered and this node not received, before the
            van stops reading from it.
        max_unread_messages: Likewise, in messages.
        heartbeat_s: A link on which nothing else was sent for so long carries a heartbeat.
        lost_after_s: A peer of which nothing was heard for so long is lost.
        timeout_s: Deadline of calls that are given none.
    """

    chunk_bytes: int = 256 << 10
    max_message_bytes: int = 1 << 30
    max_queue_bytes: int = 64 << 20
    max_queue_messages: int = 1024
    max_unread_bytes: int = 64 << 20
    max_unread_messages: int = 1024
    heartbeat_s: float = 1.0
    lost_after_s: float = 30.0
    timeout_s: float = 300.0

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
    """What a van has done so far, and what waits now; of one peer or of all.

    Attributes:
        sent: Messages handed to the network in full.
        sent_bytes: Their bytes, buffers included.
        received: Messages that arrived and were kept.
        received_bytes: Their bytes.
        queued: Messages that wait here to be sent, now.
        queued_bytes: Their bytes.
        unread: Messages that arrived and wait for `recv`, now.
        expired: Messages not sent because their deadline passed.
        late: Messages dropped at arrival because their deadline had passed.
        stale: Messages dropped because their epoch was over, here or at arrival.
        lost: Messages that were queued or under way when their link broke.
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


class Sending(Protocol):
    """A message on its way out."""

    @property
    def id(self) -> int:
        """Its number; pass it as `message_id` to send the same message again."""
        ...

    @property
    def life(self) -> int:
        """Incarnation of the peer to which it was sent; 0 if that had not greeted yet."""
        ...

    @property
    def done(self) -> bool:
        """Whether the van is finished with it, well or not: its buffers may be reused."""
        ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the van has handed all of it to the network, and the buffers may be reused.

        Args:
            timeout_s: The message's own deadline when None, or the van's `timeout_s` if it has
                none.

        Raises:
            CommTimeout: The deadline passed; `done` says whether the buffers are still in use.
            PeerLostError: The link broke before.
            StaleError: The van went on to a later epoch before.
        """
        ...


class Van(Protocol):
    """Messages to and from named nodes. Any thread may send, any thread may receive; a context manager."""

    @property
    def node(self) -> str:
        """The own name, such as "worker:3"."""
        ...

    @property
    def incarnation(self) -> int:
        """Number of this life of the node."""
        ...

    @property
    def epoch(self) -> int:
        """Membership epoch that every message carries."""
        ...

    @property
    def peers(self) -> tuple[str, ...]:
        """Nodes to which a message can be sent now, sorted."""
        ...

    @property
    def address(self) -> str:
        """What others pass to `connect`; empty if nobody can."""
        ...

    @property
    def clock(self) -> Clock:
        """The clock of its deadlines."""
        ...

    def new_id(self) -> int:
        """A number for a message that must be known before it is sent."""
        ...

    def connect(self, to: str, address: str = "", *, timeout_s: float | None = None) -> None:
        """Make a link to a node; both ends can use it. Does nothing if there is one.

        Args:
            to: Name of the node.
            address: Where it listens; vans inside one process find each other by name.
            timeout_s: Deadline; the config's when None.

        Raises:
            RendezvousError: Nobody answered, it is another node, or one does not trust the other.
        """
        ...

    def wait_for(self, peers: Sequence[str], timeout_s: float | None = None) -> None:
        """Wait until all of `peers` are connected.

        Raises:
            CommTimeout: Some were not; names them.
        """
        ...

    def send(
        self,
        to: str,
        message: Message,
        *,
        buffers: Sequence[Buffer] = (),
        priority: int = 0,
        deadline_s: float | None = None,
        answers: int = 0,
        message_id: int = 0,
    ) -> Sending:
        """Queue a message; waits while the queue of that peer is full.

        Args:
            to: Name of a connected node.
            message: Of a type of the schema.
            buffers: Contiguous objects with the buffer protocol; not copied. Leave them alone until
                the sending is `done`.
            priority: 0 to 15; more is more urgent.
            deadline_s: The message is dropped if the van has not sent it by then, or if its last
                byte arrives later; none when None. Time that it waits for `recv` does not count,
                nor does the way of its first chunk.
            answers: Id of the message that this answers.
            message_id: Number to give it, from `new_id`, or that of the earlier message which this
                repeats; a new one when 0.

        Raises:
            CommTimeout: The queue had no room until the deadline; names who does not read.
            PeerLostError: The peer is not connected, or is lost.
            StaleError: The peer is in a later epoch, or the van is closed.
            ConfigError: The message is not of the schema, too large, or a buffer is not contiguous.
        """
        ...

    def try_send(
        self,
        to: str,
        message: Message,
        *,
        buffers: Sequence[Buffer] = (),
        priority: int = 0,
        deadline_s: float | None = None,
        answers: int = 0,
        message_id: int = 0,
    ) -> Sending | None:
        """Like `send`, but None instead of waiting."""
        ...

    def recv(self, timeout_s: float | None = None) -> Delivery:
        """Wait for the next message: the most urgent that has arrived, else the oldest.

        Raises:
            CommTimeout: None came; says when each peer was last heard of.
            StaleError: The van is closed.
        """
        ...

    def try_recv(self) -> Delivery | None:
        """The next message if one is here; never waits."""
        ...

    def fileno(self) -> int:
        """Descriptor that is readable while `try_recv` would return something; for selectors only."""
        ...

    def receive_into(self, message_type: type[Message], allocate: Allocate | None) -> None:
        """Let `allocate(sender, message, sizes)` choose the memory for buffers beside messages of this type.

        It runs in the van's thread before the buffers arrive: keep it short. It returns one
        writable memoryview for each size, or None for new memory. If it raises, the link is closed.
        """
        ...

    def advance_epoch(self, epoch: int) -> None:
        """Go on to a later epoch: messages of earlier ones that wait here or arrive from now on are dropped and counted.

        Senders that are behind are told, and their next `send` raises StaleError.
        """
        ...

    def statistics(self, peer: str | None = None) -> VanStatistics:
        """Counts of one peer, or of all."""
        ...

    def close(self, linger_s: float = 1.0) -> None:
        """Say goodbye and end all links; waits up to `linger_s` for queued messages to leave. Idempotent."""
        ...

    def __enter__(self) -> Van:
        """This van."""
        ...

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""
        ...
