"""Sends the messages of a node to others; connects to them first, and remembers lost ones.

message ── this node ──────────────────> its own threads
── connected ──────────────────> van
── a call, not connected ──────> connect, at most once in `_PAUSE_S`, then van
── another, not connected ─────> undelivered: the receiver is lost
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from braid.errors import (
    BraidError,
    CommError,
    ConfigError,
    PeerLostError,
    RendezvousError,
    StaleError,
)
from braid.rpc.messages import Call
from braid.rpc.protocol.reference_messages import Fork
from braid.rpc.workers import WorkerDirectory, WorkerInfo, node_of
from braid.runtime.message import Delivery, Message, Van
from braid.runtime.transport.reachability import probe
from braid.runtime.wire import Buffer

__all__ = ["Peers"]

LOG = logging.getLogger(__name__)

_CONNECT_S = 10.0
_PROBE_S = 3.0  # for a node that has been here to accept a connection
_AGAIN_S = 0.5  # for one that was lost, or could not be reached
_PAUSE_S = 2.0  # between two attempts to reach such a node; calls fail immediately meanwhile


class _Unreachable(NamedTuple):
    """A node that could not be reached.

    Attributes:
        address: Address that was tried.
        again_ns: Time of the next attempt.
        reason: Reason in a few words.
    """

    address: str
    again_ns: int
    reason: str


@dataclass(eq=False)
class Peers:
    """Sends messages to the nodes of a group.

    Attributes:
        van: Van of this node.
        info: Name and number of this node.
        directory: Records of all nodes.
        deliver: Function that handles a message of this node to itself.
        release: Function that releases the references of a node that could not be reached.
        lost: Numbers of nodes that were lost and have not reconnected.
        is_closed: Whether this node has ended.
    """

    van: Van
    info: WorkerInfo
    directory: WorkerDirectory
    deliver: Callable[[Delivery], None]
    release: Callable[[int], None]
    lost: set[int] = field(default_factory=set)
    is_closed: bool = False

    def __post_init__(self) -> None:
        """Begin without connections."""
        self.now_ns = self.van.clock.now_ns  # clock of deadlines
        self.incarnation = self.van.incarnation  # number of this process of the node
        self._reached: set[int] = set()
        self._unreachable: dict[int, _Unreachable] = {}

    def transmit(
        self, to: int, message: Message, buffers: Sequence[Buffer] = (), *, answers: int = 0
    ) -> None:
        """Send a message, which may answer message `answers`; a lost receiver is no error."""
        try:
            self.send(to, message, buffers, answers=answers)
        except (PeerLostError, RendezvousError):
            self.undelivered(to)
        except BraidError as exc:  # no thread here waits for it
            if not self.is_closed:
                LOG.warning("node %s could not send to node %d: %s", self.info.name, to, exc)

    def send(
        self,
        to: int,
        message: Message,
        buffers: Sequence[Buffer],
        *,
        answers: int = 0,
        number: int = 0,
    ) -> None:
        """Send a message; connect first if need be.

        `answers` is the number of the message that this one answers; 0 for none.

        Raises:
            PeerLostError: The node was lost, and cannot be reached again.
            RendezvousError: The node cannot be reached, or could not be shortly before.
            StaleError: This node has ended.
        """
        if self.is_closed:
            raise self.ended()
        if to == self.info.id:
            copies = [memoryview(bytearray(buffer)) for buffer in buffers]
            number = number or self.van.new_id()
            delivery = Delivery(
                self.van.node, message, copies, number, self.incarnation, answers=answers
            )
            self.deliver(delivery)
            return
        node, send, is_connected = node_of(to), self.van.send, True
        try:
            send(node, message, buffers=buffers, answers=answers, message_id=number)
        except PeerLostError:
            is_connected = False
        if not is_connected:
            is_first = isinstance(message, Call) or (  # others go to nodes that were connected
                isinstance(message, Fork) and to not in self.lost
            )
            if answers or not is_first:
                self.undelivered(to)
                return
            self._connect(to, _CONNECT_S if isinstance(message, Call) else _PROBE_S)
            send(node, message, buffers=buffers, answers=answers, message_id=number)
        self._reached.add(to)

    def undelivered(self, to: int) -> None:
        """Release the references of a lost node, since a message to it was not delivered."""
        if not self.is_closed:
            self.release(to)

    def is_alive(self, number: int) -> bool:
        """Return whether the node with a number can be reached; connect to it if necessary."""
        if number in self.lost:
            return False
        if number != self.info.id and not self.van.is_connected(node_of(number)):
            try:
                address = self.directory.find(number).address
                self.van.connect(node_of(number), address, timeout_s=_PROBE_S)
            except (CommError, RendezvousError, ConfigError):
                self.lost.add(number)
                return False
        return True

    def ended(self) -> StaleError:
        """Return the error that is raised when this node is used after it has ended."""
        msg = (
            f"rpc.shutdown() has ended node {self.info.name}, so its references are invalid: use "
            "them before, or call rpc.init_rpc() and make new ones"
        )
        return StaleError(msg)

    def _connect(self, to: int, within_s: float) -> None:
        """Connect to a node; retry an unreachable node at most once in `_PAUSE_S`."""
        record = self.directory.find(to)
        is_lost = to in self.lost or to in self._reached  # its loss may not be known yet
        known = self._unreachable.get(to)
        if known is not None and known.address != record.address:
            known = None
        if known is None or known.again_ns <= self.now_ns():
            is_again = is_lost or known is not None
            reason = self._reach(
                to, record.address, _AGAIN_S if is_again else within_s, is_again=is_again
            )
            if not reason:
                self._unreachable.pop(to, None)
                return
            again_ns = self.now_ns() + round(_PAUSE_S * 1e9)
            known = self._unreachable[to] = _Unreachable(record.address, again_ns, reason)
        if is_lost:
            msg = f"{record.name} is lost, and cannot be called again: {known.reason}"
            raise PeerLostError(msg, rank=to)
        msg = f"{record.name} cannot be reached: {known.reason}"
        raise RendezvousError(msg)

    def _reach(self, to: int, address: str, within_s: float, *, is_again: bool) -> str:
        """Connect to a node; return the reason if that fails."""
        if is_again:  # a connection would try again until its deadline
            failed = probe({to: address}, self.van.clock, timeout_s=within_s)
            if failed:
                return failed[to]
        try:
            self.van.connect(node_of(to), address, timeout_s=within_s)
        except RendezvousError as exc:
            return str(exc)
        return ""
