"""Requests to several nodes, as a state machine: which parts are answered or must be sent again.

A request has parts, such as the shards of a table. A route maps each part to the node that has it
now. Parts with the same node are sent in one message. If the node of a part is lost, or answers
that it does not have the part any more, the part is sent again to the node that the route then
returns. Requests are sent again in the order in which they were made.

    begin      SendParts for each node
    answered   Done after the last part
    moved      SendParts again as soon as the route returns another node; at the latest with the
               next directory, even to the same node, since a directory can be missed
    again      SendParts again to the same node
    rerouted   SendParts for all parts with a new route
    lost       nothing: the next directory gives another node, or `linked` sends to the same one
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import msgspec

from braid.runtime.message import Delivery, Message
from braid.runtime.wire import Buffer

__all__ = ["Build", "Done", "OnAnswer", "PartsLost", "PendingRequest", "RequestsState", "SendParts"]

Build: TypeAlias = Callable[[tuple[int, ...]], "tuple[Message, Sequence[Buffer]]"]
OnAnswer: TypeAlias = Callable[[Delivery, tuple[int, ...]], None]


class PendingRequest(msgspec.Struct, eq=False):
    """A request that not all nodes have answered.

    Attributes:
        parts: Parts of the request, such as shards.
        route: Function that returns the node that has a part; None if no node has it.
        build: Called with parts; returns the message for them, with buffers. Called again when
            parts are sent again.
        on_answer: Called with each answer, and the parts that it answers.
        on_done: Called when all parts are answered. It may wait for other requests.
        on_failed: Called immediately when the request fails.
        memory: Function that returns the memory for the answer of a part; new memory when None.
        priority: Urgency of the messages.
        is_write: Whether the request, such as a push, stays in flight after a `wait` has timed
            out; a `wait` that times out cancels any other request.
        timestamp: Number of the request, which its customer assigns.
        asked: Node that each unanswered part was last sent to; an empty string before that.
        stuck: Parts to send to another node: their node was lost, or does not have them.
        ids: Numbers of the request's messages.
        message: The last message.
        due_ns: Time at which to send the request again, on links that lose messages.
        pause_ns: Time between the last two repetitions.
    """

    parts: Iterable[int]
    route: Callable[[int], str | None]
    build: Build
    on_answer: OnAnswer | None = None
    on_done: Callable[[], None] | None = None
    on_failed: Callable[[], object] | None = None
    memory: Callable[[int], list[memoryview]] | None = None
    priority: int = 0
    is_write: bool = False
    timestamp: int = -1
    asked: dict[int, str] = {}
    stuck: set[int] = set()
    ids: list[int] = []
    message: Message | None = None
    due_ns: int = 0
    pause_ns: int = 0


class SendParts(msgspec.Struct, frozen=True):
    """Instruction: send these parts of a request to a node."""

    request: PendingRequest
    node: str
    parts: tuple[int, ...]


class Done(msgspec.Struct, frozen=True):
    """Instruction: complete a request, since all its parts are answered."""

    request: PendingRequest


class PartsLost(msgspec.Struct, frozen=True):
    """Instruction: fail a request, since no node has these parts any more."""

    request: PendingRequest
    parts: tuple[int, ...]


class RequestsState:
    """Requests of one customer that are in flight.

    Attributes:
        requests: The requests by timestamp, in ascending order.
    """

    def __init__(self) -> None:
        self.requests: dict[int, PendingRequest] = {}

    def begin(self, request: PendingRequest) -> list[SendParts | Done | PartsLost]:
        """Add a request, and send all of its parts."""
        self.requests[request.timestamp] = request
        request.asked = dict.fromkeys(request.parts, "")
        return [*self._send(request)] if request.asked else [Done(request)]

    def answered(self, request: PendingRequest, parts: Iterable[int]) -> list[Done]:
        """Record the answer to some parts of a request; ignore repeated answers."""
        for part in parts:
            request.asked.pop(part, None)
            request.stuck.discard(part)
        return [] if request.asked else [Done(request)]

    def moved(
        self, request: PendingRequest, node: str, parts: Iterable[int]
    ) -> list[SendParts | PartsLost]:
        """Mark parts for which `node` answered that it does not have them.

        They are sent again as soon as the request's `route` returns another node.
        """
        request.stuck.update(part for part in parts if request.asked.get(part) == node)
        return self._send(request)

    def again(self, request: PendingRequest, parts: Iterable[int]) -> list[SendParts | PartsLost]:
        """Send parts again after a node has answered `Repeat` for them."""
        request.asked.update(dict.fromkeys([part for part in parts if part in request.asked], ""))
        return self._send(request)

    def rerouted(self) -> list[SendParts | PartsLost]:
        """Send all parts again that are stuck, or have a new route."""
        for request in self.requests.values():
            request.asked.update(dict.fromkeys(request.stuck, ""))
        return [sent for request in self.requests.values() for sent in self._send(request)]

    def lost(self, node: str) -> None:
        """Mark the parts that were sent to a lost node: the messages may not have arrived."""
        for request in self.requests.values():
            request.stuck.update(part for part, asked in request.asked.items() if asked == node)

    def linked(self, node: str) -> list[SendParts | PartsLost]:
        """Send parts again to a node that is connected again."""
        for request in self.requests.values():
            for part in [part for part in request.stuck if request.asked[part] == node]:
                request.stuck.discard(part)
                request.asked[part] = ""
        return self.rerouted()

    def resend(self, request: PendingRequest) -> list[SendParts | PartsLost]:
        """Send all unanswered parts of a request again, on links that lose messages."""
        request.asked = dict.fromkeys(request.asked, "")
        request.stuck.clear()
        return self._send(request)

    def forget(self, timestamp: int) -> PendingRequest | None:
        """Remove a request that is over or cancelled; return None if it was removed before."""
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
