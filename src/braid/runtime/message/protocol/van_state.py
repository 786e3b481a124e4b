"""State machine of a van: all decisions, without sockets, threads or a clock.

Problem: queues, epochs, heartbeats, back-pressure and the order in which a lost peer is reported
interact. In a driver with threads, their combinations cannot be tested.

Idea: a driver reports events on numbered links, with their times. Then it executes the instructions
of the event, and moves frames: `next_frame` on one end, `allocate` and `frame_received` on the
other.

    event                               effect                                      instructions
    link_up(link, peer)                 sends Hello                                 Carry
    ... of a peer that is known         messages can be sent to the peer now        Carry
    Hello of an unknown peer            messages can be sent to the peer            -
    Hello of a later incarnation        the old one is lost, the new one connected  Close old links
    Hello of an earlier incarnation     sends Bye; messages of it are dropped       Carry
    Hello of the same incarnation       a second link of it: both are read,         -
                                        messages use the older one
    submit(peer, message)               queued, or refused when the queue is full   Carry
    frame with the end of a message     to the inbox; dropped if stale or late      -
    ... of an epoch that is over        dropped, and the sender is sent the epoch   Carry
    ... when the peer's share is full   its links are not read (wants_read)         -
    advance_epoch(epoch)                queued or unread messages of earlier        Carry, Read
                                        epochs are dropped, and peers are informed
    space is free again                 silence while unread is forgiven            Read
    a lost peer connects again          its old messages come before its new ones   -
    link_half_closed(link)              its queued messages fail, submit is         -
                                        refused; it is read to its end, or until
                                        no message has come for HALF_CLOSED_S
    Bye, link_lost, silence, bad frame  the link ends, with its queued messages     Close
    ... of the last link of a peer      the peer is lost: PeerLost comes after its  Close
                                        last message
    tick(now)                           heartbeats, silence, deadlines              Carry, Close
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import chain

from braid.errors import CommError, ConfigError, StaleError
from braid.runtime.memory_pool import MemoryPool
from braid.runtime.message.protocol.assembly import Arrived, Inflow
from braid.runtime.message.protocol.heads import Beat, Bye, Hello
from braid.runtime.message.protocol.inbox import Inbox, Peer
from braid.runtime.message.protocol.link import (
    HALF_CLOSED_S,
    Carry,
    Close,
    Instruction,
    Read,
    VanLink,
    statistics_of,
)
from braid.runtime.message.protocol.peer_table import PeerTable, lost_error
from braid.runtime.message.protocol.schema import Message, PeerLost, Schema
from braid.runtime.message.protocol.send_queue import Outbox, OutFrame, Outgoing
from braid.runtime.message.protocol.vocabulary import (
    Allocate,
    Delivery,
    VanConfig,
    VanStatistics,
    split_node,
)

__all__ = ["HALF_CLOSED_S", "Carry", "Close", "Instruction", "Read", "VanState"]


class VanState:
    """State machine of a van (a node's connections); see the module for the table of events.

    Attributes:
        instructions: Instructions of the events so far, in order; the van removes them.
        inbox: Deliveries that wait for `Van.recv`.
        allocators: Functions that choose memory, by type of message; see `Van.receive_into`.

    Args:
        node: Name of this node.
        schema: Messages that the node understands.
        config: Limits and times.
        incarnation: Number of this life of the node, different from any earlier life.
        epoch: Membership epoch to begin with.
        detects_silence: Whether silent peers are lost; False if both ends share one process.
    """

    def __init__(
        self,
        node: str,
        schema: Schema,
        config: VanConfig,
        *,
        incarnation: int,
        epoch: int = 0,
        detects_silence: bool = True,
    ) -> None:
        split_node(node)
        self.node = node
        self.incarnation = incarnation
        self.epoch = epoch
        self.config = config
        self._schema = schema
        self._detects_silence = detects_silence
        self.allocators: dict[type[Message], Allocate] = {}
        self.inbox = Inbox(config)
        self.instructions: deque[Instruction] = deque()
        self._table = PeerTable(node, self.inbox, self.instructions)
        self._links = self._table.links
        self._pool = MemoryPool()
        self._counts: dict[str, Counter[str]] = {}
        self._quiet_until_ns: int | None = 0  # see `next_deadline_ns`; 0 if unknown

    @property
    def peers(self) -> tuple[str, ...]:
        """Nodes to which a message can be sent, sorted."""
        return self._table.names

    def is_connected(self, name: str) -> bool:
        """Return whether a message can be sent to a node."""
        return self._table.open_link(name) is not None

    @property
    def is_drained(self) -> bool:
        """Whether no message waits to be sent on any link."""
        return all(link.outbox.is_empty for link in self._links.values())

    # -- links

    def link_up(self, number: int, name: str, now_ns: int, *, known: bool = False) -> None:
        """Register an authenticated connection to the peer `name` as the new link `number`.

        Set `known` if the peer is certain, as for a pipe to a child. Messages can then be sent
        before the peer's Hello, and its loss is reported even if the Hello never comes.
        """
        config, counts = self.config, self._count(name)
        outbox = Outbox(name, config, counts)
        inflow = Inflow(name, self._schema, config.max_message_bytes, self.allocators, self._pool)
        link = self._links[number] = VanLink(
            number, name, outbox, inflow, config, counts, now_ns, now_ns
        )
        if known:
            link.peer = Peer(name, 0, self.epoch, config.max_message_bytes, [number])
            self._table.add(link.peer)
        self._quiet_until_ns = 0
        outbox.send_control(Hello(self.incarnation, self.epoch, config.max_message_bytes))
        self.instructions.append(Carry(number))

    def link_lost(
        self, number: int, reason: str, *, silent: bool = False, bye: Bye | None = None
    ) -> None:
        """Remove link `number`, whose connection has ended; a peer without a link is lost."""
        link = self._links.get(number)
        if link is not None:
            replaced = bye is not None and bye.replaced
            self._table.drop(link, PeerLost(reason, bye is not None, silent, replaced))

    def link_half_closed(self, number: int, reason: str, now_ns: int) -> None:
        """Stop sending on a link, because the peer accepts nothing; receive until it ends."""
        link = self._links.get(number)
        if link is None or link.half_closed:
            return
        link.half_closed, link.received_ns = reason, now_ns
        self._quiet_until_ns = 0
        link.outbox.fail(lost_error(link.name, reason))

    def is_ending(self, peer: str) -> bool:
        """Return whether a peer accepts nothing more, but its loss is not reported yet."""
        return bool(self._table.half_closed(peer))

    def close(self) -> None:
        """Remove all links; messages that are still queued fail."""
        self._table.close()

    def send_bye(self) -> None:
        """Notify every peer that this van closes, after the queued messages."""
        for link in self._links.values():
            self._send_control(link, Bye())

    # -- sending

    def submit(self, to: str, outgoing: Outgoing) -> bool:
        """Queue a message for a peer; return False if the queue is full.

        Raises:
            PeerLostError: The peer is unknown.
            StaleError: The peer or this node has reached a later epoch than the message's.
            ConfigError: The peer does not accept messages of this size.
        """
        peer, link = self._table.peers.get(to), self._table.open_link(to)
        if peer is None or link is None:
            raise self._table.not_connected(to)
        head = outgoing.head
        if max(peer.epoch, self.epoch) > head.epoch:
            msg = (
                f"message {head.name!r} to {to} belongs to epoch {head.epoch}, but {to} is in "
                f"epoch {peer.epoch} and {self.node} in {self.epoch}: join the later epoch before "
                "sending"
            )
            raise StaleError(msg)
        if outgoing.nbytes > peer.max_message_bytes:
            msg = (
                f"message {head.name!r} has {outgoing.nbytes} bytes, but {to} accepts "
                f"{peer.max_message_bytes}: send it in parts, or raise max_message_bytes on {to}"
            )
            raise ConfigError(msg)
        if not link.outbox.has_room(outgoing.nbytes):
            return False
        outgoing.life = peer.incarnation
        link.outbox.put(outgoing)
        if outgoing.deadline_ns is not None:
            self._quiet_until_ns = 0
        self.instructions.append(Carry(link.number))
        return True

    def next_frame(self, number: int, now_ns: int) -> OutFrame | None:
        """Return the frame to send next on a link, None if nothing waits.

        Call `frame_sent` when the frame was sent, before the next call of this method.
        """
        link = self._links.get(number)
        if link is None:
            return None
        if link.outbox.control:
            self._quiet_until_ns = 0  # a heartbeat is due later
        frame = link.outbox.next_frame(now_ns)
        if frame is not None:
            link.sent_ns = now_ns
        return frame

    def frame_sent(self, number: int, now_ns: int) -> bool:
        """Record that the last frame of a link was sent completely; return whether more wait."""
        link = self._links.get(number)
        return link is not None and link.outbox.frame_sent(now_ns)

    # -- receiving

    def allocate(
        self, number: int, meta: bytes, sizes: tuple[int, ...], now_ns: int
    ) -> Sequence[memoryview]:
        """Return the memory for the pieces of a frame that is arriving.

        Raises:
            CommError: The frame breaks the protocol, or the link is lost.
        """
        link = self._links.get(number)
        if link is None:
            msg = f"{self.node} has closed the link on which a frame of {len(meta)} bytes arrived"
            raise CommError(msg)
        return link.inflow.allocate(meta, sizes, now_ns)

    def frame_received(self, number: int, meta: bytes, now_ns: int) -> None:
        """Process a frame that has arrived completely on a link.

        Raises:
            CommError: The frame breaks the protocol; the caller must then call `link_lost`.
        """
        link = self._links.get(number)
        if link is None:
            return
        event = link.inflow.received(meta, now_ns)
        # heartbeats of a peer that accepts nothing more would hide that it is stuck
        if not (link.half_closed and isinstance(event, Beat)):
            link.received_ns = now_ns
        if isinstance(event, Arrived):
            self._on_message(link, event)
        elif isinstance(event, Hello):
            if not self._table.greet(link, event):
                self._send_control(link, Bye(replaced=True))
        elif isinstance(event, Beat) and link.peer is not None:
            link.peer.epoch = max(link.peer.epoch, event.epoch)
        elif isinstance(event, Bye):
            reason = f"a later process is {self.node}" if event.replaced else "it closed its van"
            self.link_lost(number, reason, bye=event)

    def wants_read(self, number: int) -> bool:
        """Return whether the peer's share of the inbox has space for messages of this link."""
        link = self._links.get(number)
        return link is not None and (link.peer is None or not link.peer.is_paused)

    def next_delivery(self, now_ns: int) -> Delivery | None:
        """Remove and return the most urgent message, else the oldest; None if none has arrived."""
        entry = self.inbox.pop()
        if entry is None:
            return None
        peer, delivery = entry
        if peer.is_paused:
            self._resume_reading(peer, now_ns)
        return delivery

    # -- time and epochs

    def tick(self, now_ns: int) -> None:
        """Run all due timers: heartbeats, deadlines, and the loss of silent peers."""
        self._quiet_until_ns = 0
        for link in list(self._links.values()):
            if link.number not in self._links:
                continue
            link.outbox.expire(now_ns)
            if link.outbox.control:
                self.instructions.append(Carry(link.number))
            if not self._detects_silence:
                continue
            if now_ns >= link.lost_ns and self.wants_read(link.number):
                reason = link.half_closed or link.silence(now_ns)
                self.link_lost(link.number, reason, silent=not link.half_closed)
            elif now_ns >= link.heartbeat_ns and not link.outbox.control:
                link.sent_ns = now_ns
                self._send_control(link, Beat(self.epoch))

    def next_deadline_ns(self) -> int | None:
        """Return the time before which `tick` has nothing to do; None for never.

        The time is cached, since most sends and receives only delay it. It is computed again when
        it has passed, or when an earlier deadline was added.
        """
        if self._quiet_until_ns == 0:
            due = (
                link.deadlines_ns(detects_silence=self._detects_silence)
                for link in self._links.values()
            )
            self._quiet_until_ns = min(chain.from_iterable(due), default=None)
        return self._quiet_until_ns

    def advance_epoch(self, epoch: int, now_ns: int) -> None:
        """Begin a later epoch; see `Van.advance_epoch`.

        Raises:
            ConfigError: `epoch` is earlier than the current one.
        """
        if epoch < self.epoch:
            msg = f"{self.node} is already in epoch {self.epoch}, got {epoch}: pass a larger number"
            raise ConfigError(msg)
        if epoch == self.epoch:
            return
        self.epoch = epoch
        for link in self._links.values():
            msg = f"a message to {link.name} was still queued when {self.node} began epoch {epoch}"
            link.outbox.fail_waiting(StaleError(msg))
            self._send_control(link, Beat(epoch))
        for peer in self.inbox.drop_before(epoch):
            self._count(peer.name)["stale"] += 1
            self._resume_reading(peer, now_ns)

    def last_received(self, name: str, now_ns: int) -> str:
        """Return a text with the time of the last frame from a peer, for errors."""
        return self._table.last_received(name, now_ns)

    def statistics(self, peer: str | None = None) -> VanStatistics:
        """Return the counts of one peer, or of all."""
        return statistics_of(self._counts, self._links.values(), self.inbox, peer)

    # -- inside

    def _send_control(self, link: VanLink, head: Beat | Bye) -> None:
        link.outbox.send_control(head)
        self.instructions.append(Carry(link.number))

    def _on_message(self, link: VanLink, event: Arrived) -> None:
        head, peer = event.head, link.peer
        if peer is None:  # an earlier life; Inflow accepts no message before Hello
            return
        peer.epoch = max(peer.epoch, head.epoch)
        counts = link.counts
        if head.epoch < self.epoch:
            counts["stale"] += 1
            if not link.outbox.control:
                self._send_control(link, Beat(self.epoch))  # so that the sender stops
            return
        if event.late:
            counts["late"] += 1
            return
        counts["received"] += 1
        counts["received_bytes"] += event.nbytes
        delivery = Delivery(
            peer.name,
            event.message,
            event.buffers,
            head.id,
            peer.incarnation,
            head.epoch,
            head.priority,
            head.answers,
        )
        self.inbox.put(peer, event.nbytes, delivery)
        if not self.inbox.has_room(peer):
            peer.is_paused = True

    def _resume_reading(self, peer: Peer, now_ns: int) -> None:
        """Read the links of `peer` again if its share of the inbox has room."""
        if not peer.is_paused or not self.inbox.has_room(peer):
            return
        peer.is_paused = False
        self._quiet_until_ns = 0
        for link in self._table.links_of(peer):
            link.received_ns = now_ns  # nothing was read, so silence proves nothing
            self.instructions.append(Read(link.number))

    def _count(self, name: str) -> Counter[str]:
        return self._counts.setdefault(name, Counter())
