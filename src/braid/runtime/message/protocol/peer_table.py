"""Peers of a van: the process that has each name now, and its links.

Problem: a process may be restarted under its name, both ends may connect at the same time, and
connections of an earlier process may end late or come back.

Idea: the greatest incarnation is the current life of a peer: an earlier life loses its links, and
is refused if it connects again. Two links of one life exist if both ends connect at the same time,
or if one end has lost a link before the other end has detected it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from braid.errors import PeerLostError
from braid.runtime.message.protocol.heads import Hello
from braid.runtime.message.protocol.inbox import Inbox, Peer
from braid.runtime.message.protocol.link import Close, Instruction, VanLink
from braid.runtime.message.protocol.schema import PeerLost
from braid.runtime.message.protocol.vocabulary import Delivery, split_node

__all__ = ["PeerTable", "lost_error"]


@dataclass(slots=True, eq=False)
class PeerTable:
    """Connected peers, lost peers and all links of a van.

    Attributes:
        node: Name of the van's node.
        inbox: Inbox that receives the notices of lost peers.
        instructions: Instructions to the van; `Close` is added for each link that ends.
        links: Links by number, also links without a Hello.
        peers: Connected peers by name.
        lost: Reason of the loss of each lost peer.
    """

    node: str
    inbox: Inbox
    instructions: deque[Instruction]
    links: dict[int, VanLink] = field(default_factory=dict)
    peers: dict[str, Peer] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Nodes to which a message can be sent, sorted."""
        return tuple(sorted(name for name in self.peers if self.open_link(name)))

    def open_link(self, name: str) -> VanLink | None:
        """Return the link for messages to a peer; None if it accepts none, or is not a peer."""
        peer = self.peers.get(name)
        for number in () if peer is None else peer.links:
            if not (link := self.links[number]).half_closed:
                return link
        return None

    def links_of(self, peer: Peer) -> list[VanLink]:
        """Return the links of a peer; messages are sent on the first one that accepts messages."""
        return [self.links[number] for number in peer.links]

    def half_closed(self, name: str) -> str:
        """Return why a peer accepts nothing more; empty if it accepts, or is not a peer."""
        peer = self.peers.get(name)
        if peer is None or self.open_link(name) is not None:
            return ""
        return self.links[peer.links[0]].half_closed

    def add(self, peer: Peer) -> None:
        """Add a peer; if a peer of this name is connected, it is lost."""
        if peer.name in self.peers:
            self._lose(self.peers[peer.name], PeerLost(self.half_closed(peer.name)))
        self.peers[peer.name] = peer
        self.lost.pop(peer.name, None)
        self.inbox.begin_life(peer.name)

    def greet(self, link: VanLink, hello: Hello) -> bool:
        """Process the Hello of a link; return False if an earlier process of the peer sent it."""
        if link.peer is not None:  # known before its Hello
            link.peer.incarnation, link.peer.epoch = hello.incarnation, hello.epoch
            link.peer.max_message_bytes = hello.max_message_bytes
            return True
        # The greatest incarnation wins, not the latest connection: a process that was replaced may
        # connect again at any time, and must not throw out the process in its place.
        peer = self.peers.get(link.name)
        if peer is not None and peer.incarnation > hello.incarnation:
            return False
        if peer is not None and peer.incarnation != hello.incarnation:
            reason = "another process connected under its name, so it was restarted or replaced"
            self._lose(peer, PeerLost(reason))
            peer = None
        if peer is None:
            peer = Peer(link.name, hello.incarnation, hello.epoch, hello.max_message_bytes)
            self.add(peer)
        peer.epoch = max(peer.epoch, hello.epoch)
        peer.links.append(link.number)
        link.peer = peer
        return True

    def drop(self, link: VanLink, lost: PeerLost) -> None:
        """Remove a link; a peer without a link is lost, which `lost` reports."""
        peer = link.peer
        if peer is not None and peer.links == [link.number]:
            self._lose(peer, lost)
            return
        if peer is not None:
            peer.links.remove(link.number)
        msg = f"lost a link to {link.name}: {lost.reason}"
        self._remove(link, PeerLostError(msg, rank=split_node(link.name)[1]))

    def close(self) -> None:
        """Remove all links and peers; messages that are still queued fail."""
        for link in list(self.links.values()):
            self._remove(link, PeerLostError(f"{self.node} closed before this message was sent"))
        self.peers.clear()

    def not_connected(self, name: str) -> PeerLostError:
        """Return the error of a message to a node to which none can be sent."""
        reason = self.half_closed(name) or self.lost.get(name)
        if reason is not None:
            return lost_error(name, reason)
        connected = ", ".join(self.names) or "no nodes"
        msg = (
            f"{name} is not connected to {self.node} (connected: {connected}): connect() to it, "
            "or wait_for() it"
        )
        return PeerLostError(msg, rank=split_node(name)[1])

    def last_received(self, name: str, now_ns: int) -> str:
        """Return a text with the time of the last frame from a peer, for errors."""
        peer = self.peers.get(name)
        if peer is None:
            return str(self.not_connected(name))
        received_ns = max(link.received_ns for link in self.links_of(peer))
        return f"the last frame from {name} came {(now_ns - received_ns) / 1e9:.1f} s ago"

    def _lose(self, peer: Peer, lost: PeerLost) -> None:
        # The notice is a delivery behind the peer's last message: a program that reads in order
        # first sees everything that the peer sent, and then its loss.
        self.lost[peer.name] = lost.reason
        del self.peers[peer.name]
        error = self.not_connected(peer.name)
        for link in self.links_of(peer):
            self._remove(link, error)
        peer.links.clear()
        notice = Delivery(peer.name, lost, incarnation=peer.incarnation, epoch=peer.epoch)
        self.inbox.put_notice(peer, notice)

    def _remove(self, link: VanLink, error: PeerLostError) -> None:
        del self.links[link.number]
        link.outbox.fail(error)
        self.instructions.append(Close(link.number))


def lost_error(name: str, reason: str) -> PeerLostError:
    """Return the error of a message to a peer that is lost, or accepts nothing more."""
    msg = f"lost {name}: {reason}; look for the first error of that process"
    return PeerLostError(msg, rank=split_node(name)[1])
