"""Inbox of a van: messages that wait to be received, by urgency, then by age, in shares per sender.

Problem: with one bound for all, a peer that floods this node keeps the messages of other peers out.
With a notice of loss in the same queue, an urgent notice overtakes the last messages of the lost
peer. With priorities alone, messages of a restarted peer overtake messages of its previous life.

Idea: every peer has a separate share, and the van stops reading from a peer with a full share. The
notice that a peer is lost waits until the last of its messages has been received, and then comes
before all other messages. When the peer connects again, the rest of its previous life becomes the
most urgent, and comes before any message of the new life.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from braid.runtime.message.protocol.vocabulary import NUM_PRIORITIES, Delivery, VanConfig

__all__ = ["Inbox", "Peer"]


@dataclass(slots=True, eq=False)
class Peer:
    """A process of another node; when the node restarts, it is another `Peer` of the same name.

    Attributes:
        name: Name of the node.
        incarnation: Number of the process, greater after a restart; 0 until its Hello.
        epoch: Latest known epoch of the node.
        max_message_bytes: Largest message that the node accepts.
        links: Numbers of its links; messages are sent on the first link that accepts messages.
        unread: Number of its messages in the inbox.
        unread_bytes: Size of its messages in the inbox.
        is_paused: Whether its links are not read, because its share of the inbox is full.
    """

    name: str
    incarnation: int
    epoch: int
    max_message_bytes: int
    links: list[int] = field(default_factory=list)
    unread: int = 0
    unread_bytes: int = 0
    is_paused: bool = False


class Inbox:
    """Queue of deliveries for `Van.recv`.

    Args:
        config: Limits, including the share of one peer.

    Attributes:
        size: Number of deliveries.
    """

    def __init__(self, config: VanConfig) -> None:
        self._config = config
        self._waiting: list[tuple[int, int, Peer, int, Delivery]] = []
        self._farewells: deque[tuple[Peer, Delivery]] = deque()
        self._arrivals = itertools.count()
        self.size = 0

    def has_room(self, peer: Peer) -> bool:
        """Return whether the share of `peer` is not full; one message may exceed it."""
        config = self._config
        return (
            peer.unread < config.max_unread_messages and peer.unread_bytes < config.max_unread_bytes
        )

    def put(self, peer: Peer, nbytes: int, delivery: Delivery) -> None:
        """Add a message of `nbytes` from `peer`."""
        self.size += 1
        entry = (-delivery.priority, next(self._arrivals), peer, nbytes, delivery)
        heapq.heappush(self._waiting, entry)
        peer.unread += 1
        peer.unread_bytes += nbytes

    def put_notice(self, peer: Peer, notice: Delivery) -> None:
        """Add the notice that `peer` is lost; it is delivered after the peer's last message."""
        self.size += 1
        self._farewells.append((peer, notice))

    def drop_before(self, epoch: int) -> list[Peer]:
        """Drop the messages of earlier memberships (epochs); return the sender of each one."""
        dropped = [entry for entry in self._waiting if entry[4].epoch < epoch]
        if dropped:
            self._waiting = [entry for entry in self._waiting if entry[4].epoch >= epoch]
            heapq.heapify(self._waiting)
            self.size -= len(dropped)
        for _, _, peer, nbytes, _ in dropped:
            peer.unread -= 1
            peer.unread_bytes -= nbytes
        return [entry[2] for entry in dropped]

    def begin_life(self, name: str) -> None:
        """Record that node `name` has restarted: its earlier messages become the most urgent."""
        if all(peer.name != name for peer, _ in self._farewells):
            return
        self._waiting = [
            (-NUM_PRIORITIES, *entry[1:]) if entry[2].name == name else entry
            for entry in self._waiting
        ]
        heapq.heapify(self._waiting)

    def pop(self) -> tuple[Peer, Delivery] | None:
        """Remove and return the next delivery, with its sender; None if the inbox is empty."""
        for index, (peer, notice) in enumerate(self._farewells):
            if not peer.unread:
                del self._farewells[index]
                self.size -= 1
                return peer, notice
        if not self._waiting:
            return None
        self.size -= 1
        _, _, peer, nbytes, delivery = heapq.heappop(self._waiting)
        peer.unread -= 1
        peer.unread_bytes -= nbytes
        return peer, delivery

    def num_unread(self, name: str | None) -> int:
        """Return the number of waiting messages of one node, or of all."""
        return sum(name in (None, entry[2].name) for entry in self._waiting)
