"""A request to several nodes, as a state machine: who has answered, and who must be asked again.

A request has parts, such as the shards of a table. A route says which node has a part now. Parts
with the same node travel in one message. A part is asked for again, at the node that the route then
says, when its node has been lost, or answers that it has it no longer. Requests are sent again in
the order in which they were made.

    begin      SendParts for each node
    answered   Done after the last part
    moved      SendParts again, as soon as the route says another node; with the next route at
               least, which may say the same node, since routes can be missed
    again      SendParts again to the same node
    rerouted   SendParts for all parts that wait for another node than the route says
    lost       nothing: the next route will say another node, or `linked` the same one again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple, TypeAlias

from braid.runtime.message import Delivery, Message
from braid.runtime.wire import Buffer

__all__ = ["Build", "Done", "OnAnswer", "PartsLost", "PendingRequest", "RequestsState", "SendParts"]

Build: TypeAlias = Callable[[tuple[int, ...]], "tuple[Message, Sequence[Buffer]]"]
OnAnswer: TypeAlias = Callable[[Delivery, tuple[int, ...]], None]


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request under way.

    Attributes:
        parts: Its parts, such as shards.
        route: Function that returns the node that has a part; None if there is none.
        build: Function of parts that returns the message for them, with buffers. It runs again
            when parts must be sent again.
        on_answer: Called with each answer, and the parts that it answers.
        on_done: Called when all parts are answered. It may wait for other requests.
        on_failed: Called at once when the request fails.
        memory: Function that returns the memory for the answer of a part; new memory when None.
        priority: Urgency of the messages.
        is_write: Whether the request goes on after a `wait` that has timed out, as a push does;
            others are forgotten then.
        timestamp: Number of the request, which its customer assigns.
        asked: Node that each unanswered part was sent to last; empty before that.
        stuck: Parts that must go elsewhere: their node was lost, or does not have them.
        ids: Numbers of the messages.
        message: The last message.
        due_ns: Time at which to send it again, on links that lose messages.
        pause_ns: Time between the last two repetitions.
    """

    parts: Iterable[int]
    route: Callable[[int], str | None]
    build: Build
    on_answer: OnAnswer | None = None
    _: KW_ONLY
    on_done: Callable[[], None] | None = None
    on_failed: Callable[[], object] | None = None
    memory: Callable[[int], list[memoryview]] | None = None
    priority: int = 0
    is_write: bool = False
    timestamp: int = -1
    asked: dict[int, str] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)
    ids: list[int] = field(default_factory=list)
    message: Message | None = None
    due_ns: int = 0
    pause_ns: int = 0


class SendParts(NamedTuple):
    """Send these parts of a request to a node."""

    request: PendingRequest
    node: str
    parts: tuple[int, ...]


class Done(NamedTuple):
    """All parts of a request are answered."""

    request: PendingRequest


class PartsLost(NamedTuple):
    """These parts of a request are nowhere."""

    request: PendingRequest
    parts: tuple[int, ...]


class RequestsState:
    """Requests of one customer that are under way.

    Attributes:
        requests: The requests by timestamp, in their order.
    """

    def __init__(self) -> None:
        self.requests: dict[int, PendingRequest] = {}

    def begin(self, request: PendingRequest) -> list[SendParts | Done | PartsLost]:
        """Begin a request."""
        self.requests[request.timestamp] = request
        request.asked = dict.fromkeys(request.parts, "")
        return [*self._send(request)] if request.asked else [Done(request)]

    def answered(self, request: PendingRequest, parts: Iterable[int]) -> list[Done]:
        """Record the answer to some parts; answers may come twice."""
        for part in parts:
            request.asked.pop(part, None)
            request.stuck.discard(part)
        return [] if request.asked else [Done(request)]

    def moved(
        self, request: PendingRequest, node: str, parts: Iterable[int]
    ) -> list[SendParts | PartsLost]:
        """Ask again for parts that a node does not have; the route may know where they are."""
        request.stuck.update(part for part in parts if request.asked.get(part) == node)
        return self._send(request)

    def again(self, request: PendingRequest, parts: Iterable[int]) -> list[SendParts | PartsLost]:
        """Ask again for parts whose node wants to be asked in another way."""
        request.asked.update(dict.fromkeys([part for part in parts if part in request.asked], ""))
        return self._send(request)

    def rerouted(self) -> list[SendParts | PartsLost]:
        """Ask again for all parts whose route has changed, or that had to go elsewhere."""
        for request in self.requests.values():
            request.asked.update(dict.fromkeys(request.stuck, ""))
        return [each for request in self.requests.values() for each in self._send(request)]

    def lost(self, node: str) -> None:
        """Record that messages to a node may not have arrived."""
        for request in self.requests.values():
            request.stuck.update(part for part, asked in request.asked.items() if asked == node)

    def linked(self, node: str) -> list[SendParts | PartsLost]:
        """Ask a node again that was lost, and can be reached again."""
        for request in self.requests.values():
            for part in [part for part in request.stuck if request.asked[part] == node]:
                request.stuck.discard(part)
                request.asked[part] = ""
        return self.rerouted()

    def resend(self, request: PendingRequest) -> list[SendParts | PartsLost]:
        """Ask again for all parts of a request, on links that lose messages."""
        request.asked = dict.fromkeys(request.asked, "")
        request.stuck.clear()
        return self._send(request)

    def forget(self, timestamp: int) -> PendingRequest | None:
        """Remove a request that is over, or for which nobody waits any more."""
        return self.requests.pop(timestamp, None)

    def _send(self, request: PendingRequest) -> list[SendParts | PartsLost]:
        batches: dict[str, list[int]] = {}
        gone: list[int] = []
        for part, asked in request.asked.items():
            node = request.route(part)
            if node is None:
                gone.append(part)
            elif asked != node:
                request.asked[part] = node
                request.stuck.discard(part)
                batches.setdefault(node, []).append(part)
        sends: list[SendParts | PartsLost] = [
            SendParts(request, node, tuple(parts)) for node, parts in batches.items()
        ]
        if gone:
            sends.append(PartsLost(request, tuple(gone)))
        return sends
