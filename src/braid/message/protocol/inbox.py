"""What has arrived and was not received yet: by urgency, then by age, in shares of the senders.

Problem: with one bound for all, a peer that floods this node keeps the messages of the others out.
With a notice of loss in the same queue, an urgent one overtakes the last words of the peer it
speaks of. With priorities alone, what a restarted peer says overtakes what it said in its last
life.

Idea: every peer has its own share, and the van stops reading from one whose share is full. The
notice that a peer is lost waits until the last of its messages has been received, and then comes
before everything else. When the peer is there again, what is left of its last life comes at once,
before anything of the new one.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from braid.message.protocol.vocabulary import NUM_PRIORITIES, Delivery, VanConfig

__all__ = ["Inbox", "Peer"]


@dataclass(slots=True, eq=False)
class Peer:
    """One life of another node.

    Attributes:
        name: The node.
        incarnation: Which life; 0 until it has said Hello.
        epoch: The latest in which it is known to be.
        max_message_bytes: What it accepts.
        links: Numbers of its links; messages leave on the first that the peer listens to.
        unread: Messages of it in the inbox.
        unread_bytes: Their bytes.
    """

    name: str
    incarnation: int
    epoch: int
    max_message_bytes: int
    links: list[int] = field(default_factory=list)
    unread: int = 0
    unread_bytes: int = 0


class Inbox:
    """Deliveries that wait for `recv`.

    Args:
        config: The share of one peer.
    """

    def __init__(self, config: VanConfig) -> None:
        self._config = config
        self._waiting: list[tuple[int, int, Peer, int, Delivery]] = []
        self._farewells: deque[tuple[Peer, Delivery]] = deque()
        self._arrivals = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._waiting) or bool(self._farewells)

    def has_room(self, peer: Peer) -> bool:
        """Whether the share of `peer` is not full; one message may exceed it."""
        config = self._config
        return (
            peer.unread < config.max_unread_messages and peer.unread_bytes < config.max_unread_bytes
        )

    def put(self, peer: Peer, nbytes: int, delivery: Delivery) -> None:
        """A message of `nbytes` has arrived."""
        entry = (-delivery.priority, next(self._arrivals), peer, nbytes, delivery)
        heapq.heappush(self._waiting, entry)
        peer.unread += 1
        peer.unread_bytes += nbytes

    def put_notice(self, peer: Peer, notice: Delivery) -> None:
        """`peer` is lost; `notice` says so after its last message."""
        self._farewells.append((peer, notice))

    def drop_before(self, epoch: int) -> list[Peer]:
        """Forget the messages of earlier epochs; returns whose each was."""
        dropped = [entry for entry in self._waiting if entry[4].epoch < epoch]
        if dropped:
            self._waiting = [entry for entry in self._waiting if entry[4].epoch >= epoch]
            heapq.heapify(self._waiting)
        for _, _, peer, nbytes, _ in dropped:
            peer.unread -= 1
            peer.unread_bytes -= nbytes
        return [entry[2] for entry in dropped]

    def begin_life(self, name: str) -> None:
        """A new life of `name` begins: what is left of the last one becomes more urgent than anything."""
        if all(peer.name != name for peer, _ in self._farewells):
            return
        self._waiting = [
            (-NUM_PRIORITIES, *entry[1:]) if entry[2].name == name else entry
            for entry in self._waiting
        ]
        heapq.heapify(self._waiting)

    def pop(self) -> tuple[Peer, Delivery] | None:
        """The next delivery and whose share it frees; None if there is none."""
        for index, (peer, notice) in enumerate(self._farewells):
            if not peer.unread:
                del self._farewells[index]
                return peer, notice
        if not self._waiting:
            return None
        _, _, peer, nbytes, delivery = heapq.heappop(self._waiting)
        peer.unread -= 1
        peer.unread_bytes -= nbytes
        return peer, delivery

    def num_unread(self, name: str | None) -> int:
        """Messages of one node that wait, or of all."""
        return sum(name in (None, entry[2].name) for entry in self._waiting)
