"""Requests with a number and a text, to any node or group.

    app = SimpleApp(node, app_id=0)
    app.set_request_handle(lambda asked, app: app.response(asked, "done"))
    app.wait(app.request(head=1, body="save", to=SERVER_GROUP))

Source: PS-Lite's SimpleApp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import asdict

from braid.errors import CommError, ConfigError
from braid.ps.kv.app import App, Ticket
from braid.ps.kv.groups import id_of, members_of
from braid.ps.kv.messages import Note, NoteReceived
from braid.ps.messages import check_type
from braid.runtime.message import Delivery

if TYPE_CHECKING:
    from braid.ps.kv.node import KVNode

__all__ = ["SimpleApp", "SimpleData"]


@dataclass(frozen=True, slots=True)
class SimpleData:
    """A request or an answer, as passed to handles.

    Attributes:
        head: Number that the sender's program has passed as `head`.
        body: Text of the request or the answer.
        sender: Number of the node that has sent it.
        timestamp: Number of the request at the node that sent the request.
        customer_id: Number of the customer that sent the request.
        ticket: Address of the answer; None for an answer.
    """

    head: int
    body: str
    sender: int
    timestamp: int
    customer_id: int
    ticket: Ticket | None = None


RequestHandle: TypeAlias = Callable[[SimpleData, "SimpleApp"], object]


class SimpleApp(App):
    """An app that sends and answers notes; see `App` for its arguments."""

    def __init__(self, node: KVNode, app_id: int = 0, customer_id: int = 0) -> None:
        self._note_handle: RequestHandle | None = None
        self._response_handle: RequestHandle | None = None
        super().__init__(node, app_id, customer_id)

    def set_request_handle(self, handle: RequestHandle) -> None:
        """Set the function that is called with each note; it calls `response`, now or later."""
        self._note_handle = handle

    def set_response_handle(self, handle: RequestHandle) -> None:
        """Set the function that is called with each answer to this app's notes."""
        self._response_handle = handle

    def request(
        self,
        head: int,
        body: str,
        to: int,
        *,
        callback: Callable[[], object] | None = None,
        priority: int = 0,
    ) -> int:
        """Send a note (a number and a text) to a node or a group of nodes.

        Args:
            head: Number for the receiver's handle.
            body: Text for the receiver's handle.
            to: Number of a node, or of a group; see `groups`.
            callback: Function that runs when all nodes have answered.
            priority: Urgency, 0 to 15.

        Returns:
            The timestamp to `wait` for.

        Raises:
            ConfigError: The node or group does not exist or includes this node, `head` is not an
                int, or `body` is not a string.
        """
        check_type("the head of a note must be a whole number", head, int)
        check_type("the body of a note must be a text", body, str)
        nodes = members_of(to, self._node.num_servers, self._node.num_workers)
        if self._node.name in nodes:
            msg = (
                f"{self._node.name} belongs to group {to}, and a node cannot send requests to "
                "itself: pass other nodes"
            )
            raise ConfigError(msg)

        def on_answer(part: int, delivery: Delivery) -> None:
            message, handle = delivery.message, self._response_handle
            assert isinstance(message, NoteReceived), "notes are answered by notes"
            if handle is not None:
                data = SimpleData(head, message.body, part, timestamp, self.customer_id)
                self._call_back(timestamp, lambda: handle(data, self))

        with self._postoffice.lock:
            timestamp = self._customer.next_timestamp
            return self._ask(
                {id_of(node): node for node in nodes},
                lambda header: (Note(**asdict(header), head=head, body=body), ()),
                on_answer=on_answer,
                callback=callback,
                priority=priority,
            )

    def response(self, asked: SimpleData, body: str = "") -> None:
        """Answer a note with a text.

        Raises:
            ConfigError: `asked` is not a received note, or was answered before, or the answer is
                not a string.
        """
        if asked.ticket is None:
            msg = "response() got an answer: pass the request that your handle function received"
            raise ConfigError(msg)
        check_type("the answer to a note must be a text", body, str)
        self._reply(asked.ticket, NoteReceived((asked.ticket.part,), body))

    def _execute(self, delivery: Delivery, ticket: Ticket) -> None:
        message, name = delivery.message, f"app {self.app_id} of {self._node.name}"
        if not isinstance(message, Note):
            msg = f"{name} is a SimpleApp: make a KVServer to serve pushes and pulls"
            raise CommError(msg)
        if self._note_handle is None:
            msg = f"{name} has no handler of requests: call set_request_handle(function) first"
            raise CommError(msg)
        asker = id_of(ticket.node)
        data = SimpleData(
            message.head, message.body, asker, message.timestamp, message.customer, ticket
        )
        self._note_handle(data, self)
