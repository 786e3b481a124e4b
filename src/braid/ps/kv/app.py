"""Apps send requests to each other: the common base of key-value apps and simple apps.

    requests   Customer ── KVRequest(app, customer, timestamp, seen, part) ──> node of each part
    answers    Executed drops repetitions ──> queue ──> handle, one at a time, in order of arrival

Handles and callbacks run in the node's thread, or in a waiting thread, without the lock: they may
wait for requests. A callback runs when its request is complete, so it may also wait for that
request. Outside of callbacks, `wait` also waits for the callback.

Source: PS-Lite's SimpleApp and Customer. There, a callback that waits for its own request never
returns, and `Wait` has no deadline.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from braid.errors import BraidError, CommError, CommTimeout, ConfigError
from braid.ps.customer import Customer
from braid.ps.kv.messages import KVRequest
from braid.ps.kv.protocol.executed import RequestProgress, RequestStream
from braid.ps.messages import Repeat, RequestRefused
from braid.ps.protocol.requests_state import PendingRequest
from braid.runtime.message import Delivery, Message
from braid.runtime.wire import Buffer

if TYPE_CHECKING:
    from braid.ps.kv.node import KVNode

__all__ = ["App", "Build", "Ticket"]

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Address for the answer to a request: the asking node, and the request's numbers."""

    node: str
    message_id: int
    stream: RequestStream
    timestamp: int
    part: int
    priority: int


Build: TypeAlias = Callable[[KVRequest], "tuple[Message, Sequence[Buffer]]"]
OnAnswer: TypeAlias = Callable[[int, Delivery], None]


class App(ABC):
    """Base class of a program's components on a node, which send requests to each other.

    Args:
        node: Node of the process.
        app_id: Number of the app, the same on all nodes.
        customer_id: Number among the apps of a worker's process with this `app_id`, so that each
            thread can have one.

    Raises:
        ConfigError: The numbers are in use, or negative.
    """

    def __init__(self, node: KVNode, app_id: int = 0, customer_id: int = 0) -> None:
        self._node = node
        self.app_id, self.customer_id = app_id, customer_id
        self._postoffice = node.postoffice
        self._customer = Customer(node.postoffice, lambda _: node.losses())
        self._queue: deque[tuple[Delivery, Ticket]] = deque()
        self._is_working = False
        self._pending: Counter[int] = Counter()  # callbacks of each request that have not run
        self._failures: dict[int, Exception] = {}
        node.register(self)

    def is_ready_for(self, message: KVRequest) -> bool:
        """Return whether a request can be executed now, such as when its handle is set.

        The node keeps other requests for `unknown_s` seconds.
        """
        del message
        return True

    @property
    def customer(self) -> Customer:
        """`Customer` object, which sends the requests of this app."""
        return self._customer

    # -- requests

    def wait(self, timestamp: int, timeout_s: float | None = None) -> None:
        """Wait until all nodes have answered a request, and its callback has run.

        Args:
            timestamp: Number of the request.
            timeout_s: Deadline; 300 s when None.

        Raises:
            ConfigError: The request does not exist.
            CommError: A node refused the request, or the callback failed.
            PeerLostError: A node that must answer is lost; the error names it.
            CommTimeout: Some nodes have not answered by the deadline; the error names them.
        """
        if not 0 <= timestamp < self._customer.next_timestamp:
            msg = (
                f"there is no request {timestamp} of app {self.app_id}, customer "
                f"{self.customer_id}, which has made {self._customer.next_timestamp} requests: "
                "pass a timestamp that a request returned"
            )
            raise ConfigError(msg)
        self._customer.wait(timestamp, timeout_s)
        if not self._node.is_in_handle:
            self._wait_for_callbacks(timestamp, timeout_s)
        if timestamp in self._failures:
            raise self._failures.pop(timestamp)

    def _wait_for_callbacks(self, timestamp: int, timeout_s: float | None) -> None:
        """Wait until another thread has run the callbacks of a request; never receives."""
        seconds = 300.0 if timeout_s is None else timeout_s
        with self._postoffice.lock:
            is_over = self._postoffice.lock.wait_for(
                lambda: not self._pending[timestamp] or timestamp in self._failures, seconds
            )
        if not is_over:
            msg = f"the callback of request {timestamp} has not returned within {seconds:g} s"
            raise CommTimeout(msg)

    def wait_all(self, timeout_s: float | None = None) -> None:
        """Wait for all requests; see `wait`."""
        self._customer.wait_all(timeout_s)
        for timestamp in [number for number, count in list(self._pending.items()) if count]:
            self.wait(timestamp, timeout_s)
        for timestamp in list(self._failures):
            raise self._failures.pop(timestamp)

    def _ask(
        self,
        nodes: Mapping[int, str],
        build: Build,
        *,
        on_answer: OnAnswer | None = None,
        callback: Callable[[], object] | None = None,
        memory: Callable[[int], list[memoryview]] | None = None,
        priority: int = 0,
    ) -> int:
        """Send a request with one part for each node; return its timestamp."""

        def header(parts: tuple[int, ...]) -> KVRequest:
            (part,) = parts  # each node has one
            return KVRequest(
                app=self.app_id,
                customer=self.customer_id,
                timestamp=timestamp,
                seen=self._customer.first_open,
                part=part,
            )

        def received(delivery: Delivery, parts: tuple[int, ...]) -> None:
            try:
                if on_answer is not None:
                    on_answer(parts[0], delivery)
            except Exception as exc:  # noqa: BLE001 - raised again in wait; the node continues
                failure = CommError(f"answer of {delivery.sender}: {exc}")
                failure.__cause__ = exc
                self._failures[timestamp] = failure

        with self._postoffice.lock:
            timestamp = self._customer.next_timestamp
            self._customer.request(
                PendingRequest(
                    nodes,
                    lambda part: None if nodes[part] in self._node.lost else nodes[part],
                    lambda parts: build(header(parts)),
                    received,
                    on_done=None if callback is None else partial(self._run, timestamp, callback),
                    on_failed=lambda: self._pending.pop(timestamp, None),
                    memory=memory,
                    priority=priority,
                )
            )
            if callback is not None and not self._customer.has_failed(timestamp):
                self._pending[timestamp] += 1
        return timestamp

    def _call_back(self, timestamp: int, callback: Callable[[], object]) -> None:
        """Schedule a function of the program; `wait` also waits for it. Called with the lock."""
        self._pending[timestamp] += 1
        self._postoffice.call_soon(partial(self._run, timestamp, callback))

    def _run(self, timestamp: int, callback: Callable[[], object]) -> None:
        try:
            if timestamp not in self._failures:
                with self._node.in_handle():
                    callback()
        except Exception as exc:  # noqa: BLE001 - raised again in wait
            self._failures[timestamp] = exc
        finally:
            with self._postoffice.lock:
                self._pending[timestamp] -= 1
                if self._pending[timestamp] <= 0:
                    del self._pending[timestamp]

    # -- answers

    def receive(self, delivery: Delivery) -> None:
        """Queue a new request of another node; the node calls this with the lock held."""
        message = delivery.message
        assert isinstance(message, KVRequest), "apps handle requests"
        stream = RequestStream(delivery.sender, delivery.incarnation, message.app, message.customer)
        ticket = Ticket(
            delivery.sender,
            delivery.id,
            stream,
            message.timestamp,
            message.part,
            delivery.priority,
        )
        state = self._node.executed.begin(stream, message.timestamp, message.seen)
        if state is RequestProgress.NEW:
            self._queue.append((delivery, ticket))
            self._postoffice.call_soon(self._work)
        elif not isinstance(state, RequestProgress):
            self._send(ticket, *state)

    @abstractmethod
    def _execute(self, delivery: Delivery, ticket: Ticket) -> None:
        """Execute a request; answer it with `_reply`, now or later."""

    def _carry_out(self, delivery: Delivery, ticket: Ticket) -> None:
        try:
            with self._node.in_handle():
                self._execute(delivery, ticket)
        except Exception as exc:  # noqa: BLE001 - the sender must receive any error
            text = str(exc) if isinstance(exc, BraidError) else f"{type(exc).__name__}: {exc}"
            try:
                self._reply(ticket, RequestRefused(text))
            except ConfigError:
                LOG.warning("request of %s failed after its answer: %s", ticket.node, text)

    def _work(self) -> None:
        """Execute the queued requests, unless another thread does so already."""
        with self._postoffice.lock:
            if self._is_working:
                return
            self._is_working = True
        try:
            while True:
                with self._postoffice.lock:
                    if not self._queue:
                        self._is_working = False
                        return
                    delivery, ticket = self._queue.popleft()
                self._carry_out(delivery, ticket)
        except BaseException:
            self._is_working = False
            raise

    def _reply(self, ticket: Ticket, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Answer a request; keep the answer until the sender confirms it.

        Raises:
            ConfigError: The request was answered before.
        """
        executed = self._node.executed
        with self._postoffice.lock:
            if not executed.finish(ticket.stream, ticket.timestamp, (message, buffers)):
                msg = (
                    f"request {ticket.timestamp} of {ticket.node} was already answered: call "
                    "response() once per request"
                )
                raise ConfigError(msg)
            try:
                self._send(ticket, message, buffers)
            except ConfigError as exc:  # such as for an answer that is too large
                refused = RequestRefused(f"the answer cannot be sent: {exc}")
                executed.replace(ticket.stream, ticket.timestamp, (refused, ()))
                self._send(ticket, refused, ())

    def _ask_again(self, ticket: Ticket) -> None:
        """Ask the sender to build a request again and send it."""
        with self._postoffice.lock:
            self._node.executed.cancel(ticket.stream, ticket.timestamp)
            self._send(ticket, Repeat((ticket.part,)), ())

    def _send(self, ticket: Ticket, message: Message, buffers: Sequence[Buffer]) -> None:
        self._postoffice.send(
            ticket.node,
            message,
            buffers,
            answers=ticket.message_id,
            priority=ticket.priority,
        )

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<{name} {self.app_id} of {self._node.name}, {self._customer.num_under_way} open>"
