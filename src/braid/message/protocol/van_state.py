"""What a van decides, as a state machine: no sockets, no threads, no clock.

Problem: queues, epochs, heartbeats, back-pressure and the order in which a lost peer is reported
interact, and in a driver with threads nobody can test their combinations.

Idea: drivers report what happened on numbered links and what time it is, then carry out the
instructions that this left behind, and move frames: `next_frame` on one end, `allocate` and
`frame_received` on the other.

    event                                  effect                                        instructions
    link_up(link, peer)                    says Hello                                    Carry
    ... of a peer that is known            it can be sent to at once                     Carry
    Hello of an unknown peer               the peer can be sent to                       -
    Hello of another incarnation           the old one is lost, the new one can be       Close old links
    Hello of the same incarnation          a second link of it: both are read,           -
                                           messages leave on the older
    submit(peer, message)                  queued, or refused when the queue is full     Carry
    frame with the end of a message        to the inbox; dropped if stale or late        -
    ... of an epoch that is over           dropped, and the sender is told the epoch     Carry
    ... when the peer's share is full      its links are not read (wants_read)           -
    advance_epoch(epoch)                   what is queued or unread of earlier ones is   Carry, Read
                                           dropped, and the peers are told
    room is made again                     silence while unread is forgiven              Read
    a peer that was lost is here again     its last words come before its first ones     -
    link_deaf(link)                        what was queued on it fails, what is sent is  -
                                           refused; it is read on, to its end, or until
                                           no message has come for LAST_WORDS_S
    Bye, link_lost, silence, bad frame     the link ends, and what was queued on it      Close
    ... of the last link of a peer         the peer is lost: PeerLost comes after its    Close
                                           last message
    tick(now)                              heartbeats, silence, deadlines                Carry, Close

Which life of a peer is current is decided by the last Hello: one that was replaced under its name
loses its links. Two links of one life come from both ends connecting at the same time, or from an
end that has given up a link of which the other does not know yet.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from braid.errors import CommError, ConfigError, PeerLostError, StaleError
from braid.message.protocol.assembly import Arrived, Inflow
from braid.message.protocol.heads import Beat, Bye, Hello
from braid.message.protocol.inbox import Inbox, Peer
from braid.message.protocol.schema import Message, PeerLost, Schema
from braid.message.protocol.send_queue import Outbox, OutFrame, Outgoing
from braid.message.protocol.van import Allocate, Delivery, VanConfig, VanStatistics, split_node

__all__ = ["LAST_WORDS_S", "Carry", "Close", "Instruction", "Read", "VanState"]

LAST_WORDS_S = 1.0  # one that takes nothing more is heard until it has said nothing for so long


@dataclass(frozen=True, slots=True)
class Carry:
    """Frames wait for this link: ask `next_frame`."""

    link: int


@dataclass(frozen=True, slots=True)
class Close:
    """The state has forgotten this link: close what carries it."""

    link: int


@dataclass(frozen=True, slots=True)
class Read:
    """This link wants to be read again."""

    link: int


Instruction: TypeAlias = Carry | Close | Read


@dataclass(slots=True, eq=False)
class _Link:
    number: int
    name: str  # of the peer, as the handshake proved it
    outbox: Outbox
    inflow: Inflow
    heard_ns: int
    said_ns: int
    peer: Peer | None = None  # None until its Hello
    is_paused: bool = False  # the peer's share of the inbox is full
    deaf: str = ""  # why the peer takes nothing more from it


class VanState:
    """All that a van knows; see the table above.

    Attributes:
        instructions: What the events so far ask of the driver, in order; it takes them out.
        inbox: What has arrived.
        allocators: See `Van.receive_into`.

    Args:
        node: Own name.
        schema: The messages.
        config: Limits and times.
        incarnation: Number of this life of the node; another than that of every earlier one.
        epoch: Membership epoch to begin with.
        watches_silence: Whether peers are lost by silence; not when both ends share one process.
    """

    def __init__(
        self,
        node: str,
        schema: Schema,
        config: VanConfig,
        *,
        incarnation: int,
        epoch: int = 0,
        watches_silence: bool = True,
    ) -> None:
        split_node(node)
        self.node = node
        self.incarnation = incarnation
        self.epoch = epoch
        self.config = config
        self._schema = schema
        self._watches_silence = watches_silence
        self.allocators: dict[type[Message], Allocate] = {}
        self._links: dict[int, _Link] = {}
        self._peers: dict[str, Peer] = {}
        self._lost: dict[str, str] = {}  # how the link of a peer that is gone ended
        self.inbox = Inbox(config)
        self.instructions: deque[Instruction] = deque()
        self._counts: dict[str, Counter[str]] = {}

    @property
    def peers(self) -> tuple[str, ...]:
        """Nodes to which a message can be sent, sorted."""
        return tuple(sorted(name for name, peer in self._peers.items() if self._way_to(peer)))

    @property
    def is_drained(self) -> bool:
        """Whether nothing waits to be sent."""
        return all(link.outbox.is_empty for link in self._links.values())

    # -- links

    def link_up(self, link: int, peer: str, now_ns: int, *, known: bool = False) -> None:
        """A connection to `peer`, whose name is proven, has been made; `link` is a new number for it.

        Nobody else can be at the other end of one that is `known`, such as a pipe to a child: it is
        a peer before its Hello, and its loss is told even if that never comes.
        """
        config = self.config
        outbox = Outbox(peer, config, self._count(peer))
        inflow = Inflow(peer, self._schema, config.max_message_bytes, self.allocators)
        entry = self._links[link] = _Link(link, peer, outbox, inflow, now_ns, now_ns)
        if known:
            if peer in self._peers:
                self._lose(self._peers[peer], PeerLost(self._deaf(peer)))
            entry.peer = Peer(peer, 0, self.epoch, config.max_message_bytes, [link])
            self._peers[peer] = entry.peer
            self._lost.pop(peer, None)
            self.inbox.succeed(peer)
        outbox.say(Hello(self.incarnation, self.epoch, config.max_message_bytes))
        self.instructions.append(Carry(link))

    def link_lost(
        self, link: int, reason: str, *, orderly: bool = False, silent: bool = False
    ) -> None:
        """The connection `link` has ended; with its last one, the peer is lost."""
        lost = self._links.get(link)
        if lost is None:
            return
        peer = lost.peer
        if peer is not None and peer.links == [link]:
            self._lose(peer, PeerLost(reason, orderly, silent))
            return
        if peer is not None:
            peer.links.remove(link)
        msg = f"lost a link to {lost.name}: {reason}"
        self._forget(lost, PeerLostError(msg, rank=split_node(lost.name)[1]))

    def link_deaf(self, link: int, reason: str, now_ns: int) -> None:
        """The peer takes nothing more from `link`; what it still says is received until the link ends."""
        found = self._links.get(link)
        if found is None or found.deaf:
            return
        found.deaf, found.heard_ns = reason, now_ns
        found.outbox.fail(_lost_error(found.name, reason))

    def is_ending(self, peer: str) -> bool:
        """Whether a peer takes nothing more and may still say something: its loss has not been told."""
        return bool(self._deaf(peer))

    def close(self) -> None:
        """Forget all links: what is still queued will not leave."""
        for link in list(self._links.values()):
            self._forget(link, PeerLostError(f"{self.node} closed its van before this had left"))
        self._peers.clear()

    def say_bye(self) -> None:
        """Tell every peer that this van closes; after the messages that are queued."""
        for link in self._links.values():
            link.outbox.say(Bye())
            self.instructions.append(Carry(link.number))

    # -- sending

    def submit(self, to: str, outgoing: Outgoing) -> bool:
        """Queue a message for a peer; False if there is no room now.

        Raises:
            PeerLostError: There is no such peer.
            StaleError: The peer or this node has gone on to a later epoch than the message's.
            ConfigError: The peer does not accept messages of this size.
        """
        peer = self._peers.get(to)
        link = None if peer is None else self._way_to(peer)
        if peer is None or link is None:
            raise self._absent(to)
        head = outgoing.head
        if max(peer.epoch, self.epoch) > head.epoch:
            msg = (
                f"message {head.name!r} to {to} belongs to epoch {head.epoch}, but {to} is in "
                f"epoch {peer.epoch} and "
                f"{self.node} in {self.epoch}: join the later epoch before sending"
            )
            raise StaleError(msg)
        if head.nbytes > peer.max_message_bytes:
            msg = (
                f"message {head.name!r} has {head.nbytes} bytes, but {to} accepts "
                f"{peer.max_message_bytes}: send it in "
                "parts, or raise max_message_bytes there"
            )
            raise ConfigError(msg)
        if not link.outbox.has_room(head.nbytes):
            return False
        outgoing.life = peer.incarnation
        link.outbox.put(outgoing)
        self.instructions.append(Carry(link.number))
        return True

    def next_frame(self, link: int, now_ns: int) -> OutFrame | None:
        """What leaves next on `link`; report with `frame_sent` before asking again."""
        found = self._links.get(link)
        if found is None:
            return None
        frame = found.outbox.next_frame(now_ns)
        if frame is not None:
            found.said_ns = now_ns
        return frame

    def frame_sent(self, link: int, now_ns: int) -> None:
        """The network has all of the last frame of `link`."""
        found = self._links.get(link)
        if found is None:
            return
        found.outbox.frame_sent(now_ns)

    # -- receiving

    def allocate(
        self, link: int, meta: bytes, sizes: tuple[int, ...], now_ns: int
    ) -> Sequence[memoryview]:
        """Where the pieces of a frame that is arriving go; CommError if it is none of ours."""
        found = self._links.get(link)
        if found is None:
            msg = f"a frame of {len(meta)} bytes arrived on a link that {self.node} has given up"
            raise CommError(msg)
        return found.inflow.allocate(meta, sizes, now_ns)

    def frame_received(self, link: int, meta: bytes, now_ns: int) -> None:
        """A frame has arrived whole; CommError if it breaks the protocol: then report `link_lost`."""
        found = self._links.get(link)
        if found is None:
            return
        event = found.inflow.received(meta, now_ns)
        if not (found.deaf and isinstance(event, Beat)):
            found.heard_ns = now_ns
        if isinstance(event, Hello):
            self._meet(found, event)
        elif isinstance(event, Beat) and found.peer is not None:
            found.peer.epoch = max(found.peer.epoch, event.epoch)
        elif isinstance(event, Bye):
            self.link_lost(link, "it closed its van", orderly=True)
        elif isinstance(event, Arrived):
            self._arrive(found, event)

    def wants_read(self, link: int) -> bool:
        """Whether the peer's share of the inbox has room."""
        found = self._links.get(link)
        return found is not None and not found.is_paused

    def next_delivery(self, now_ns: int) -> Delivery | None:
        """The most urgent message that has arrived, else the oldest; None if there is none."""
        found = self.inbox.pop()
        if found is None:
            return None
        peer, delivery = found
        self._read_again(peer, now_ns)
        return delivery

    # -- time and epochs

    def tick(self, now_ns: int) -> None:
        """Do what is due: heartbeats, deadlines, and silence."""
        config = self.config
        for link in list(self._links.values()):
            if link.number not in self._links:
                continue
            link.outbox.expire(now_ns)
            if link.outbox.has_control:
                self.instructions.append(Carry(link.number))
            if not self._watches_silence:
                continue
            if self.wants_read(link.number) and now_ns >= self._silent_at_ns(link):
                silence_s = (now_ns - link.heard_ns) / 1e9
                reason = link.deaf or (
                    f"nothing was heard of it for {silence_s:.1f} s (limit "
                    f"{config.lost_after_s:g} s): it is stopped, "
                    "its host is down, or the network is cut"
                )
                self.link_lost(link.number, reason, silent=not link.deaf)
            elif now_ns >= self._beat_at_ns(link) and not link.outbox.has_control:
                link.outbox.say(Beat(self.epoch))
                link.said_ns = now_ns
                self.instructions.append(Carry(link.number))

    def next_deadline_ns(self) -> int | None:
        """When to call `tick` next; None if there is nothing to wait for."""
        due = []
        for link in self._links.values():
            deadline_ns = link.outbox.next_deadline_ns()
            if deadline_ns is not None:
                due.append(deadline_ns)
            if self._watches_silence:
                if not link.outbox.has_control:
                    due.append(self._beat_at_ns(link))
                if self.wants_read(link.number):
                    due.append(self._silent_at_ns(link))
        return min(due, default=None)

    def advance_epoch(self, epoch: int, now_ns: int) -> None:
        """See `Van.advance_epoch`."""
        if epoch < self.epoch:
            msg = (
                f"expected an epoch after {self.epoch} of {self.node}, found {epoch}: epochs "
                "only grow"
            )
            raise ConfigError(msg)
        if epoch == self.epoch:
            return
        self.epoch = epoch
        for link in self._links.values():
            msg = (
                f"a message to {link.name} was still queued when {self.node} went on to epoch "
                f"{epoch}"
            )
            link.outbox.fail_waiting(StaleError(msg))
            link.outbox.say(Beat(epoch))
            self.instructions.append(Carry(link.number))
        for peer in self.inbox.drop_before(epoch):
            self._count(peer.name)["stale"] += 1
            self._read_again(peer, now_ns)

    def last_heard(self, peer: str, now_ns: int) -> str:
        """When `peer` was last heard of, as errors say it."""
        known = self._peers.get(peer)
        if known is None:
            return str(self._absent(peer))
        heard_ns = max(self._links[link].heard_ns for link in known.links)
        return f"{peer} was last heard of {(now_ns - heard_ns) / 1e9:.1f} s ago"

    def statistics(self, peer: str | None = None) -> VanStatistics:
        """Counts of one peer, or of all."""
        total: Counter[str] = Counter()
        for name, counts in self._counts.items():
            if peer in (None, name):
                total.update(counts)
        for link in self._links.values():
            if peer in (None, link.name):
                total.update(queued=link.outbox.queued, queued_bytes=link.outbox.queued_bytes)
        total.update(unread=self.inbox.num_unread(peer))
        return VanStatistics(**total)

    # -- inside

    def _way_to(self, peer: Peer) -> _Link | None:
        """The link on which messages to a peer leave, if there is one."""
        links = (self._links[number] for number in peer.links)
        return next((link for link in links if not link.deaf), None)

    def _deaf(self, name: str) -> str:
        """Why a peer that is not lost takes nothing more; empty if it does, or is no peer."""
        peer = self._peers.get(name)
        if peer is None or self._way_to(peer) is not None:
            return ""
        return self._links[peer.links[0]].deaf

    def _meet(self, link: _Link, hello: Hello) -> None:
        """The first frame of a link: now it is known which life of the peer is at its other end."""
        if link.peer is not None:  # known before it spoke
            link.peer.incarnation, link.peer.epoch = hello.incarnation, hello.epoch
            link.peer.max_message_bytes = hello.max_message_bytes
            return
        peer = self._peers.get(link.name)
        if peer is not None and peer.incarnation != hello.incarnation:
            reason = "another process connected under its name: it was restarted or replaced"
            self._lose(peer, PeerLost(reason))
            peer = None
        if peer is None:
            peer = Peer(link.name, hello.incarnation, hello.epoch, hello.max_message_bytes)
            self._peers[link.name] = peer
            self._lost.pop(link.name, None)
            self.inbox.succeed(link.name)
        peer.epoch = max(peer.epoch, hello.epoch)
        peer.links.append(link.number)
        link.peer = peer

    def _arrive(self, link: _Link, event: Arrived) -> None:
        head, peer = event.head, link.peer
        assert peer is not None  # Inflow takes no message before Hello
        peer.epoch = max(peer.epoch, head.epoch)
        counts = self._count(peer.name)
        if head.epoch < self.epoch:
            counts["stale"] += 1
            if not link.outbox.has_control:
                link.outbox.say(Beat(self.epoch))  # so that it stops
                self.instructions.append(Carry(link.number))
            return
        if event.late:
            counts["late"] += 1
            return
        counts["received"] += 1
        counts["received_bytes"] += head.nbytes
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
        self.inbox.put(peer, head.nbytes, delivery)
        if not self.inbox.has_room(peer):
            for number in peer.links:
                self._links[number].is_paused = True

    def _read_again(self, peer: Peer, now_ns: int) -> None:
        """Messages of `peer` have left the inbox: read its links if there is room."""
        if not self.inbox.has_room(peer):
            return
        for number in peer.links:
            link = self._links[number]
            if link.is_paused:
                link.is_paused = False
                link.heard_ns = now_ns  # nobody listened, so nothing was heard
                self.instructions.append(Read(number))

    def _lose(self, peer: Peer, lost: PeerLost) -> None:
        self._lost[peer.name] = lost.reason
        del self._peers[peer.name]
        error = self._absent(peer.name)
        for number in peer.links:
            self._forget(self._links[number], error)
        peer.links.clear()
        notice = Delivery(peer.name, lost, incarnation=peer.incarnation, epoch=peer.epoch)
        self.inbox.say_farewell(peer, notice)

    def _forget(self, link: _Link, error: PeerLostError) -> None:
        del self._links[link.number]
        link.outbox.fail(error)
        self.instructions.append(Close(link.number))

    def _absent(self, name: str) -> PeerLostError:
        reason = self._deaf(name) or self._lost.get(name)
        if reason is not None:
            return _lost_error(name, reason)
        connected = ", ".join(self.peers) or "nobody"
        msg = (
            f"expected {name} to be connected to {self.node}, found {connected}: connect() to "
            "it, or wait_for() it"
        )
        return PeerLostError(msg, rank=split_node(name)[1])

    def _beat_at_ns(self, link: _Link) -> int:
        return link.said_ns + round(self.config.heartbeat_s * 1e9)

    def _silent_at_ns(self, link: _Link) -> int:
        limit_s = self.config.lost_after_s
        if link.deaf:
            limit_s = min(limit_s, LAST_WORDS_S)
        return link.heard_ns + round(limit_s * 1e9)

    def _count(self, name: str) -> Counter[str]:
        return self._counts.setdefault(name, Counter())


def _lost_error(name: str, reason: str) -> PeerLostError:
    msg = f"lost {name}: {reason}; look for the first error of that process"
    return PeerLostError(msg, rank=split_node(name)[1])
