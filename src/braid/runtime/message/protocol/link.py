"""State of one link to a peer, for the state machine of a van."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from braid.runtime.message.protocol.assembly import Inflow
from braid.runtime.message.protocol.inbox import Inbox, Peer
from braid.runtime.message.protocol.send_queue import Outbox
from braid.runtime.message.protocol.vocabulary import VanConfig, VanStatistics

__all__ = ["HALF_CLOSED_S", "Carry", "Close", "Instruction", "Read", "VanLink", "statistics_of"]

HALF_CLOSED_S = 1.0  # read a peer that accepts nothing more until it is silent for this time


class Carry(msgspec.Struct, frozen=True):
    """Instruction to the van: send the frames that `VanState.next_frame` returns for a link."""

    link: int


class Close(msgspec.Struct, frozen=True):
    """Instruction to the van: close the connection of a link that the state has removed."""

    link: int


class Read(msgspec.Struct, frozen=True):
    """Instruction to the van: read from a link again, since the inbox has space for its peer."""

    link: int


Instruction: TypeAlias = Carry | Close | Read


@dataclass(slots=True, eq=False)
class VanLink:
    """Connection to a peer.

    Attributes:
        number: Number that the van gave to the link.
        name: Name of the peer, proven by the handshake.
        outbox: Messages that wait to be sent.
        inflow: Message that is arriving.
        config: Limits and times of the van.
        counts: Counts of the link's messages, under the names of fields of `VanStatistics`.
        received_ns: Time of the last frame from the peer.
        sent_ns: Time of the last frame to the peer.
        peer: Process of the peer; None until its Hello has arrived.
        half_closed: Reason why the peer accepts nothing more on this link; empty if it accepts.
    """

    number: int
    name: str
    outbox: Outbox
    inflow: Inflow
    config: VanConfig
    counts: Counter[str]
    received_ns: int
    sent_ns: int
    peer: Peer | None = None
    half_closed: str = ""

    @property
    def heartbeat_ns(self) -> int:
        """Time at which a heartbeat is due."""
        return self.sent_ns + round(self.config.heartbeat_s * 1e9)

    @property
    def lost_ns(self) -> int:
        """Time at which the peer is lost if nothing more comes from it."""
        limit_s = self.config.lost_after_s
        if self.half_closed:
            limit_s = min(limit_s, HALF_CLOSED_S)
        return self.received_ns + round(limit_s * 1e9)

    def deadlines_ns(self, *, detects_silence: bool) -> Iterator[int]:
        """Yield the times at which something is due: a message's deadline, a heartbeat, a loss."""
        deadline_ns = self.outbox.next_deadline_ns()
        if deadline_ns is not None:
            yield deadline_ns
        if detects_silence and not self.outbox.control:
            yield self.heartbeat_ns
        if detects_silence and not (self.peer and self.peer.is_paused):
            yield self.lost_ns

    def silence(self, now_ns: int) -> str:
        """Return the duration of the peer's silence as a text, for the reason of its loss."""
        silence_s = (now_ns - self.received_ns) / 1e9
        return (
            f"nothing came from it for {silence_s:.1f} s (limit {self.config.lost_after_s:g} s): "
            "it is stopped, its host is down, or the network is cut"
        )


def statistics_of(
    counts: Mapping[str, Counter[str]], links: Iterable[VanLink], inbox: Inbox, peer: str | None
) -> VanStatistics:
    """Return the counts of one peer, or of all peers when None."""
    total: Counter[str] = Counter()
    for name, of_peer in counts.items():
        if peer in (None, name):
            total.update(of_peer)
    for link in links:
        if peer in (None, link.name):
            total.update(queued=link.outbox.queued, queued_bytes=link.outbox.queued_bytes)
    total.update(unread=inbox.num_unread(peer))
    return VanStatistics(**total)
