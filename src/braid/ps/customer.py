"""A customer sends requests to several nodes and collects their answers.

    timestamp = customer.request(PendingRequest(parts, route, build))
                                     parts -> one message for each node
    customer.wait(timestamp)         until all parts are answered

Requests overlap: any number may be in flight. If a node is lost or no longer has a part, the
request for that part is sent again to the node that `route` then returns. A failed request raises
in `wait`, or in the next call if the program does not wait for it.

Source: PS-Lite's Customer. There, `Wait` has no timeout, and a callback that waits deadlocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from braid.errors import CommError, CommTimeout, ConfigError, PeerLostError
from braid.ps.explained import explained
from braid.ps.messages import (
    Answer,
    Dealt,
    Elsewhere,
    NextData,
    Repeat,
    RequestRefused,
    check_type,
)
from braid.ps.postoffice import Postoffice
from braid.ps.protocol.directory import SCHEDULER, Directory
from braid.ps.protocol.requests_state import (
    Done,
    OnAnswer,
    PartsLost,
    PendingRequest,
    RequestsState,
    SendParts,
)
from braid.runtime.events import Span
from braid.runtime.message import Delivery, Message

__all__ = ["Customer", "ask_scheduler", "dealt_ranges"]

MAX_PAUSE = 8  # times `resend_s`, between two repetitions of a request


class Customer:
    """Sends the requests of one component of a node (a process), such as a worker's tables.

    Args:
        postoffice: Sends and receives the node's messages.
        why_lost: Called with parts of a request that no node has; returns the reason for the error.

    Attributes:
        next_timestamp: Timestamp of the next request.
    """

    def __init__(
        self,
        postoffice: Postoffice,
        why_lost: Callable[[tuple[int, ...]], str] = lambda parts: (
            f"all nodes that had the parts {parts} are lost"
        ),
    ) -> None:
        self.postoffice = postoffice
        self._why_lost = why_lost
        self._state = RequestsState()
        self._requests = self._state.requests
        self.next_timestamp = 0
        self._by_id: dict[int, PendingRequest] = {}
        self._errors: dict[int, CommError] = {}
        postoffice.register(
            {},
            on_directory=self._reroute,
            on_lost=self._state.lost,
            on_linked=lambda node: self._act(self._state.linked(node)),
            on_resend=self._resend,
            memory=self.memory_for,
        )

    def request(self, request: PendingRequest) -> int:
        """Send a request; return its timestamp.

        Raises:
            CommError: An earlier request, for which the program did not wait, has failed.
        """
        postoffice = self.postoffice
        if self._errors or postoffice.failure:
            self._raise_any()
        timestamp = request.timestamp = self.next_timestamp
        self.next_timestamp += 1
        request.pause_ns = round((postoffice.resend_s or 0.0) * 1e9)
        request.due_ns = postoffice.van.clock.now_ns() + request.pause_ns
        try:
            self._act(self._state.begin(request))
        except BaseException:
            self.cancel(timestamp)
            raise
        return timestamp

    def wait(self, timestamp: int, timeout_s: float | None = None) -> None:
        """Wait until all parts of a request are answered.

        Raises:
            CommError: A node refused the request.
            PeerLostError: All nodes that had a part are lost.
            CommTimeout: Parts are unanswered; the error names the asked nodes and their waits.
        """
        if timestamp in self._requests:
            events = self.postoffice.events
            begin_ns = events.now_ns()
            try:
                self.postoffice.wait_until(
                    lambda: timestamp not in self._requests or self.postoffice.failure,
                    timeout_s,
                    lambda: self._missing(timestamp),
                    lambda: self._asking(timestamp),
                )
            except CommTimeout as exc:
                with self.postoffice.lock.lock:  # its answer may come now, in another thread
                    request = self._requests.get(timestamp)
                    asked = {node for node in request.asked.values() if node} if request else {}
                    if request is not None and not request.is_write:
                        self.cancel(timestamp)
                raise explained(self.postoffice, exc, sorted(asked)) from None
            finally:
                events.complete("wait", begin_ns, events.now_ns() - begin_ns, seq=timestamp)
        if timestamp in self._errors:
            raise self._errors.pop(timestamp)
        if timestamp in self._requests:
            self.postoffice.raise_failure()

    def _asking(self, timestamp: int) -> Span | None:
        """Begin the span of the wait for a request, for reports of hangs."""
        with self.postoffice.lock.lock:
            request = self._requests.get(timestamp)
            if request is None:
                return None
            message, nodes = request.message, {*request.asked.values()}
        return self.postoffice.waits.ask(message, nodes, timestamp)

    def cancel(self, timestamp: int) -> None:
        """Forget a request that the caller could not send; later calls do not raise its error."""
        self._finish(timestamp, CommError("it was cancelled"))
        self._errors.pop(timestamp, None)

    def wait_all(self, timeout_s: float | None = None) -> None:
        """Wait for all requests in flight; see `wait`."""
        for timestamp in list(self._requests):
            self.wait(timestamp, timeout_s)
        self._raise_any()

    def is_done(self, timestamp: int) -> bool:
        """Return whether a request is answered or has failed; does not block."""
        return timestamp not in self._requests

    def has_failed(self, timestamp: int) -> bool:
        """Return whether a request has failed, and no `wait` has raised its error."""
        return timestamp in self._errors

    def memory_for(
        self, message_id: int, parts: Sequence[int], sizes: tuple[int, ...]
    ) -> list[memoryview] | None:
        """Return the memory for the answer to a message; None if a part is no longer expected.

        The thread of the van (the node's transport) may call this while the answer arrives.
        """
        request = self._by_id.get(message_id)
        if request is None or request.memory is None:
            return None
        if not all(part in request.asked for part in parts):
            return None
        views = [view for part in parts for view in request.memory(part)]
        return views if tuple(map(len, views)) == sizes else None

    @property
    def first_open(self) -> int:
        """Timestamp of the oldest request in flight; the next timestamp if there is none."""
        return next(iter(self._requests), self.next_timestamp)

    @property
    def num_under_way(self) -> int:
        """Number of requests in flight."""
        return len(self._requests)

    def _raise_any(self) -> None:
        for timestamp in list(self._errors):
            raise self._errors.pop(timestamp)
        self.postoffice.raise_failure()

    def _missing(self, timestamp: int) -> str:
        request = self._requests.get(timestamp)
        asked = request.asked if request is not None else {}
        nodes = sorted({node or "no node" for node in asked.values()})
        return f"{', '.join(nodes)} did not answer {len(asked)} parts of request {timestamp}"

    def _act(self, instructions: Sequence[SendParts | Done | PartsLost]) -> None:
        for instruction in instructions:
            match instruction:
                case SendParts(request, node, parts):
                    self._send(request, node, parts)
                case Done(request):
                    self._finish(request.timestamp)
                case PartsLost(request, parts):
                    text = self.postoffice.failure or self._why_lost(parts)
                    self._finish(request.timestamp, PeerLostError(text))

    def _send(self, request: PendingRequest, node: str, parts: tuple[int, ...]) -> None:
        postoffice = self.postoffice
        request.message, buffers = request.build(parts)
        number = postoffice.new_id()
        request.ids.append(number)
        self._by_id[number] = request
        postoffice.expected[number] = partial(self._answer, request)
        if not postoffice.send(
            node, request.message, buffers, message_id=number, priority=request.priority
        ):
            self._state.lost(node)

    def _finish(self, timestamp: int, error: CommError | None = None) -> None:
        request = self._state.forget(timestamp)
        if request is None:
            return
        request.asked.clear()  # the van's thread may hold it: `memory_for` then returns None
        for number in request.ids:
            del self.postoffice.expected[number], self._by_id[number]
        if error is not None:
            self._errors[timestamp] = error
            if request.on_failed is not None:
                request.on_failed()
        elif request.on_done is not None:
            self.postoffice.call_soon(request.on_done)

    def _resend(self) -> None:
        """Send overdue requests again, with growing pauses, so that they do not flood a node."""
        now_ns = self.postoffice.van.clock.now_ns()
        most_ns = round((self.postoffice.resend_s or 0.0) * MAX_PAUSE * 1e9)
        for request in list(self._requests.values()):
            if request.due_ns <= now_ns:
                request.pause_ns = min(2 * request.pause_ns, most_ns)
                request.due_ns = now_ns + request.pause_ns
                self._act(self._state.resend(request))

    def _reroute(self, directory: Directory) -> None:
        del directory
        self._act(self._state.rerouted())

    def _answer(self, request: PendingRequest, delivery: Delivery) -> None:
        message = delivery.message
        if isinstance(message, RequestRefused):
            text = f"{delivery.sender} refused the request: {message.text}"
            self._finish(request.timestamp, CommError(text))
        elif isinstance(message, Elsewhere):
            self._act(self._state.moved(request, delivery.sender, message.parts))
        elif isinstance(message, Repeat):
            self._act(self._state.again(request, message.parts))
        elif isinstance(message, Answer):
            new = tuple([part for part in message.parts if part in request.asked])
            if request.on_answer is not None and new:
                request.on_answer(delivery, new)
            self._act(self._state.answered(request, new))


def ask_scheduler(
    customer: Customer,
    message: Message,
    on_answer: OnAnswer | None = None,
    timeout_s: float | None = None,
) -> None:
    """Send a message to the scheduler, and wait for the answer."""
    request = PendingRequest([0], lambda _: SCHEDULER, lambda _: (message, ()), on_answer)
    customer.wait(customer.request(request), timeout_s)


def dealt_ranges(
    customer: Customer,
    name: str,
    num_samples: int,
    shard_size: int,
    epochs: int,
) -> Iterator[range]:
    """Yield ranges of samples that the scheduler deals out; see `Node.samples`.

    Args:
        customer: Customer of the worker.
        name: Name of the samples.
        num_samples: Number of samples.
        shard_size: Number of samples in a range.
        epochs: Number of times that each sample is dealt out.

    Raises:
        ConfigError: A number is less than 1, or the name is not a string.
    """
    check_type("the name of samples must be a text", name, str)
    if min(num_samples, shard_size, epochs) < 1:
        msg = (
            f"num_samples, shard_size and epochs must be at least 1, got {num_samples}, "
            f"{shard_size} and {epochs}"
        )
        raise ConfigError(msg)
    per_epoch = -(-num_samples // shard_size)
    finished: tuple[int, ...] = ()
    dealt: list[int] = []

    def on_answer(delivery: Delivery, parts: tuple[int, ...]) -> None:
        del parts
        assert isinstance(delivery.message, Dealt), "data is answered with a shard"
        dealt.append(delivery.message.shard)

    while True:
        ask_scheduler(customer, NextData(name, per_epoch * epochs, finished), on_answer)
        shard = dealt.pop()
        if shard < 0:
            return
        begin = shard % per_epoch * shard_size
        yield range(begin, min(begin + shard_size, num_samples))
        finished = (shard,)
