"""A customer sends requests to many nodes, and counts the answers.

    timestamp = customer.request(parts, route, build)     parts -> one message for each node
    customer.wait(timestamp)                              until all parts are answered

Requests overlap: any number may be under way. A part whose node is lost, or is no longer where it
was, is asked for again where the route then says. A request that fails raises in `wait`, or in the
next call if nobody waits.

Source: PS-Lite's Customer, whose wait has no end, and whose callbacks block if they wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from braid.errors import CommError, CommTimeout, PeerLostError
from braid.ps.messages import Answer, Elsewhere, Repeat, RequestRefused
from braid.ps.postoffice import Postoffice
from braid.ps.protocol.directory import Directory
from braid.ps.protocol.requests_state import Done, PartsLost, RequestsState, Route, SendParts
from braid.runtime.message import Delivery, Message
from braid.runtime.wire import Buffer

__all__ = ["Build", "Customer", "Memory", "OnAnswer"]

Build: TypeAlias = Callable[[tuple[int, ...]], "tuple[Message, Sequence[Buffer]]"]
OnAnswer: TypeAlias = Callable[[Delivery, tuple[int, ...]], None]
Memory: TypeAlias = Callable[[int], list[memoryview]]

MAX_PAUSE = 8  # times `resend_s`, between two repetitions of a request


@dataclass(slots=True)
class _Request:
    """A request that is under way."""

    build: Build
    on_answer: OnAnswer | None
    on_done: Callable[[], None] | None
    on_failed: Callable[[], None] | None
    memory: Memory | None
    priority: int
    is_write: bool
    ids: list[int] = field(default_factory=list)
    due_ns: int = 0  # when to send it again, on links that lose messages
    pause_ns: int = 0
    message: Message | None = None  # the last one


class Customer:
    """Requests of one part of a node.

    Args:
        postoffice: Post office of the node.
        why_lost: Function of parts without a node that says why there is none, for the error.

    Attributes:
        next_timestamp: Timestamp of the next request.
    """

    def __init__(
        self,
        postoffice: Postoffice,
        why_lost: Callable[[tuple[int, ...]], str] = lambda parts: (
            f"nobody has the parts {parts} any more"
        ),
    ) -> None:
        self._postoffice = postoffice
        self._why_lost = why_lost
        self._state = RequestsState()
        self.next_timestamp = 0
        self._requests: dict[int, _Request] = {}
        self._by_id: dict[int, int] = {}
        self._errors: dict[int, CommError] = {}
        postoffice.register(
            {},
            on_directory=self._reroute,
            on_lost=self._state.lost,
            on_linked=lambda node: self._act(self._state.linked(node)),
            on_resend=self._resend,
        )

    def request(
        self,
        parts: Iterable[int],
        route: Route,
        build: Build,
        *,
        on_answer: OnAnswer | None = None,
        on_done: Callable[[], None] | None = None,
        on_failed: Callable[[], None] | None = None,
        memory: Memory | None = None,
        priority: int = 0,
        is_write: bool = False,
    ) -> int:
        """Send a request.

        Args:
            parts: Its parts, such as shards.
            route: Function that returns the node that has a part; None if there is none.
            build: Function of parts that returns the message for them, with buffers. It
                runs again when parts must be sent again.
            on_answer: Called with each answer, and the parts that it answers.
            on_done: Called when all parts are answered. It may wait for other requests.
            on_failed: Called at once when it fails.
            memory: Function that returns the memory for the answer of a part; new memory when None.
            priority: Urgency of the messages.
            is_write: Whether it goes on after a `wait` that has timed out, as a push does; others
                are forgotten then.

        Returns:
            The timestamp of the request.

        Raises:
            CommError: An earlier request, for which nobody waited, has failed.
        """
        self._raise_any()
        timestamp = self.next_timestamp
        self.next_timestamp += 1
        self._requests[timestamp] = _Request(
            build, on_answer, on_done, on_failed, memory, priority, is_write
        )
        own = self._requests[timestamp]
        own.pause_ns = round((self._postoffice.resend_s or 0.0) * 1e9)
        own.due_ns = self._postoffice.van.clock.now_ns() + own.pause_ns
        try:
            self._act(self._state.begin(timestamp, parts, route))
        except BaseException:
            self.cancel(timestamp)
            raise
        return timestamp

    def wait(self, timestamp: int, timeout_s: float | None = None) -> None:
        """Wait until all parts of a request are answered.

        Raises:
            CommError: A node refused it.
            PeerLostError: What it needs is lost.
            CommTimeout: Parts are unanswered; names who was asked, and for whom who waits there.
        """
        if timestamp in self._requests:
            with self._postoffice.events.span("wait", seq=timestamp), self._asking(timestamp):
                try:
                    self._postoffice.wait_until(
                        lambda: timestamp not in self._requests or bool(self._postoffice.failure),
                        timeout_s,
                        lambda: self._missing(timestamp),
                    )
                except CommTimeout as exc:
                    with self._postoffice.lock:  # its answer may come now, in another thread
                        asked = {node for node in self._state.missing(timestamp).values() if node}
                        own = self._requests.get(timestamp)
                        if own is not None and not own.is_write:
                            self.cancel(timestamp)
                    raise self._postoffice.explained(exc, sorted(asked)) from None
        if timestamp in self._errors:
            raise self._errors.pop(timestamp)
        if timestamp in self._requests:
            self._postoffice.raise_failure()

    def _asking(self, timestamp: int) -> contextlib.AbstractContextManager[object]:
        """Return the span of the wait for a request, for reports of hangs."""
        with self._postoffice.lock:
            own = self._requests.get(timestamp)
            message = None if own is None else own.message
            nodes = set(self._state.missing(timestamp).values())
        return self._postoffice.waits.ask(message, nodes, timestamp)

    def cancel(self, timestamp: int) -> None:
        """Forget a request that cannot be sent."""
        self._finish(timestamp, CommError("it was cancelled"))
        self._errors.pop(timestamp, None)

    def wait_all(self, timeout_s: float | None = None) -> None:
        """Wait for all requests under way; see `wait`."""
        for timestamp in list(self._requests):
            self.wait(timestamp, timeout_s)
        self._raise_any()

    def is_done(self, timestamp: int) -> bool:
        """Whether a request is over; never waits."""
        return timestamp not in self._requests

    def has_failed(self, timestamp: int) -> bool:
        """Whether a request has failed, and nobody has waited for it."""
        return timestamp in self._errors

    def memory_for(
        self, message_id: int, parts: Sequence[int], sizes: tuple[int, ...]
    ) -> list[memoryview] | None:
        """Return where the answer to a message goes; None if nobody waits for all of its parts.

        It may be called in the thread of the van.
        """
        timestamp = self._by_id.get(message_id)
        own = None if timestamp is None else self._requests.get(timestamp)
        if own is None or own.memory is None or timestamp is None:
            return None
        if not all(self._state.waits_for(timestamp, part) for part in parts):
            return None
        views = [view for part in parts for view in own.memory(part)]
        return views if tuple(map(len, views)) == sizes else None

    @property
    def first_open(self) -> int:
        """The least timestamp of a request that is under way; the next one if there is none."""
        return next(iter(self._requests), self.next_timestamp)

    def reroute(self) -> None:
        """Ask again for all parts of which the route says another node now."""
        self._act(self._state.rerouted())

    @property
    def num_under_way(self) -> int:
        """Number of requests that are not answered in full."""
        return len(self._requests)

    def _raise_any(self) -> None:
        for timestamp in list(self._errors):
            raise self._errors.pop(timestamp)
        self._postoffice.raise_failure()

    def _missing(self, timestamp: int) -> str:
        asked = self._state.missing(timestamp)
        nodes = sorted({node or "nobody" for node in asked.values()})
        return f"{len(asked)} parts of request {timestamp} are unanswered by {', '.join(nodes)}"

    def _act(self, instructions: Sequence[SendParts | Done | PartsLost]) -> None:
        for each in instructions:
            match each:
                case SendParts(timestamp, node, parts):
                    self._send(timestamp, node, parts)
                case Done(timestamp):
                    self._finish(timestamp)
                case PartsLost(timestamp, parts):
                    text = self._postoffice.failure or self._why_lost(parts)
                    self._finish(timestamp, PeerLostError(text))

    def _send(self, timestamp: int, node: str, parts: tuple[int, ...]) -> None:
        own = self._requests[timestamp]
        message, buffers = own.build(parts)
        number = self._postoffice.new_id()
        own.ids.append(number)
        own.message = message
        self._by_id[number] = timestamp
        self._postoffice.expect(number, partial(self._answer, timestamp))
        if not self._postoffice.send(
            node, message, buffers, message_id=number, priority=own.priority
        ):
            self._state.lost(node)

    def _finish(self, timestamp: int, error: CommError | None = None) -> None:
        own = self._requests.pop(timestamp, None)
        if own is None:
            return
        self._state.forget(timestamp)
        self._postoffice.expect_no_more(own.ids)
        for number in own.ids:
            del self._by_id[number]
        if error is not None:
            self._errors[timestamp] = error
            if own.on_failed is not None:
                own.on_failed()
        elif own.on_done is not None:
            self._postoffice.call_soon(own.on_done)

    def _resend(self) -> None:
        """Send requests again that wait for long, each time later, so that none flood a node."""
        now_ns = self._postoffice.van.clock.now_ns()
        most_ns = round((self._postoffice.resend_s or 0.0) * MAX_PAUSE * 1e9)
        for timestamp, own in list(self._requests.items()):
            if own.due_ns <= now_ns:
                own.pause_ns = min(2 * own.pause_ns, most_ns)
                own.due_ns = now_ns + own.pause_ns
                self._act(self._state.resend(timestamp))

    def _reroute(self, directory: Directory) -> None:
        del directory
        self.reroute()

    def _answer(self, timestamp: int, delivery: Delivery) -> None:
        message = delivery.message
        if isinstance(message, RequestRefused):
            self._finish(timestamp, CommError(f"{delivery.sender} refuses: {message.text}"))
        elif isinstance(message, Elsewhere):
            self._act(self._state.moved(timestamp, delivery.sender, message.parts))
        elif isinstance(message, Repeat):
            self._act(self._state.again(timestamp, message.parts))
        elif isinstance(message, Answer):
            new = tuple(p for p in message.parts if self._state.waits_for(timestamp, p))
            on_answer = self._requests[timestamp].on_answer
            if on_answer is not None and new:
                on_answer(delivery, new)
            self._act(self._state.answered(timestamp, new))
