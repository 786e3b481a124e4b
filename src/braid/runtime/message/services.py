"""Requests and answers over a van: a request is executed once, even if it is sent twice.

Problem: a van delivers at most once, so a caller that needs an answer must ask again; a plain
repetition would execute a request twice. Exceptions of handlers, deaths of peers and late answers
must all reach the waiting caller.

Idea: a repetition has the id of the first request. For each life of each caller, a service
remembers the ids that it has seen and its answers; it sends an answer again without executing the
request. Exceptions are sent as text (`Failed`).

    class Lookup(msgspec.Struct, tag="lookup"): ...

    service = Service(van, {Lookup: lambda delivery: Place(where=table[delivery.message.name])})
    service.start()
    answer = service.call("driver", Lookup("a"), timeout_s=5, retry_s=1).message

One thread at a time receives: the thread of `start`, or else one that waits in `call` or `serve`;
other threads wait for it. A handler may also call.


Source: A. Birrell, B. Nelson, "Implementing Remote Procedure Calls", ACM TOCS 1984: call
identifiers and at-most-once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from braid.errors import (
    CommError,
    CommTimeout,
    ConfigError,
    PeerLostError,
    StaleError,
    below,
    raise_all,
)
from braid.runtime.closing import Closing
from braid.runtime.message.protocol.schema import Failed, Message, PeerLost
from braid.runtime.message.protocol.send_queue import Sending
from braid.runtime.message.protocol.vocabulary import Delivery, split_node
from braid.runtime.message.van import Van
from braid.runtime.wire import Buffer

__all__ = ["Handler", "Reply", "Service"]


class Reply(NamedTuple):
    """Answer of a handler with buffers beside the message.

    The service keeps both to answer repeated requests: do not change the buffers.

    Attributes:
        message: Message, of a type of the schema.
        buffers: Buffers to send beside the message.
        priority: Urgency of the answer; None for the priority of the request.
    """

    message: Message
    buffers: Sequence[Buffer] = ()
    priority: int | None = None


Handler: TypeAlias = Callable[[Delivery], Message | Reply | None]


class _OpenRequest:
    """Request without an answer so far."""

    def __init__(self, to: str) -> None:
        self.to = to
        self.answer: Delivery | None = None
        self.sending: Sending | None = None  # last one; None until the first has been queued
        self.losses: dict[int, str] = {}  # reason of the loss, by life of the peer

    @property
    def lost(self) -> str:
        """Reason why the process that received the request was lost; empty if it is alive.

        The loss of an earlier process of the same node does not count.
        """
        if self.sending is None:
            return ""
        if not self.sending.life:  # sent before the peer had announced its life
            return next(iter(self.losses.values()), "")
        return self.losses.get(self.sending.life, "")


class _CallerMemory:
    """Requests of one life of a caller, and their answers."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.answers: OrderedDict[int, Reply | None] = OrderedDict()


class Service(Closing):
    """Message router: calls handlers by type, sends their results as answers, calls other nodes.

    Args:
        van: Connections of this node to other nodes; owned and closed by the service.
        handlers: Handler for each type of message. Its result is the answer, None for no answer.
            `PeerLost` is routed like a message, and an exception of its handler ends `serve`.
        num_remembered: Number of remembered requests per caller; must exceed the number of a
            caller's concurrent requests.

    On failure: a message without a handler, or with a handler that raises, is answered with
    `Failed`. An answer is dropped if it does not fit: the service does not wait, and the
    caller can ask again.
    """

    def __init__(
        self,
        van: Van,
        handlers: Mapping[type[Message], Handler] | None = None,
        *,
        num_remembered: int = 256,
    ) -> None:
        raise_all(below(1, num_remembered=num_remembered))
        self._van = van
        self._handlers = dict(handlers or {})
        self._num_remembered = num_remembered
        self._changed = threading.Condition()
        self._is_receiving = False
        self._calls: dict[int, _OpenRequest] = {}
        self._memories: dict[str, _CallerMemory] = {}
        self._thread: threading.Thread | None = None

    @property
    def van(self) -> Van:
        """Van of the service; use it to send messages that need no answer."""
        return self._van

    def call(
        self,
        to: str,
        message: Message,
        timeout_s: float | None = None,
        *,
        buffers: Sequence[Buffer] = (),
        priority: int = 0,
        retry_s: float | None = None,
        message_id: int = 0,
    ) -> Delivery:
        """Send a request and wait for its answer.

        Args:
            to: Name of a connected node.
            message: The request.
            timeout_s: Deadline for the whole call; None for 300 s.
            buffers: Buffers of the request; free again when this returns, not when it raises.
            priority: Urgency of the request.
            retry_s: Seconds without an answer after which the request is sent again; None for
                never.
            message_id: Id of an earlier call, to repeat that call, for example over a new
                connection.

        Raises:
            CommTimeout: No answer came.
            PeerLostError: The peer is not connected, or was lost before it answered.
            CommError: The handler raised; the text contains its exception.
            StaleError: The peer is in a later epoch, or the van is closed.
        """
        seconds = 300.0 if timeout_s is None else timeout_s
        deadline_ns = self._van.clock.after_ns(seconds)
        number = message_id or self._van.new_id()
        call = _OpenRequest(to)
        with self._changed:
            self._calls[number] = call
        try:
            first = call.sending = self._van.send(
                to,
                message,
                buffers=buffers,
                priority=priority,
                deadline_s=seconds,
                message_id=number,
            )
            while not self._answered(call, deadline_ns, retry_s):
                left_s = (deadline_ns - self._van.clock.now_ns()) / 1e9
                if left_s <= 0:
                    name = type(message).__name__
                    msg = f"{to} did not answer request {name} #{number} within {seconds:g} s"
                    raise CommTimeout(msg)
                if call.sending.done:
                    again = self._van.try_send(
                        to,
                        message,
                        # copies, since the sending may outlive this call
                        buffers=[bytes(buffer) for buffer in buffers],
                        priority=priority,
                        deadline_s=left_s,
                        message_id=number,
                    )
                    call.sending = again or call.sending
        finally:
            with self._changed:
                del self._calls[number]
        if not first.done:  # the answer may arrive before the sending is marked as done
            first.wait(seconds)
        assert call.answer is not None
        if isinstance(call.answer.message, Failed):
            failed = call.answer.message
            msg = (
                f"{to} failed in {type(message).__name__} #{number}: {failed.error}: {failed.text}"
            )
            raise CommError(msg)
        return call.answer

    def serve(self, timeout_s: float | None = None) -> bool:
        """Handle the next message that arrives; return False if none came within `timeout_s`.

        Raises:
            StaleError: The van is closed.
        """
        deadline_ns = None
        if timeout_s is not None:
            deadline_ns = self._van.clock.after_ns(timeout_s)
        return self._receive(deadline_ns, lambda: False)

    def handle(self, delivery: Delivery) -> None:
        """Process a delivery that the caller has received, such as in a simulated network."""
        with self._changed:
            self._finish_request(delivery)
        self._dispatch(delivery)

    def start(self) -> None:
        """Serve in a separate thread until `close`."""
        if self._thread is None:
            name = f"braid-message-{self._van.node}-service"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def close(self, linger_s: float = 1.0) -> None:
        """Close the van, and end the thread. Idempotent; handlers must not call it."""
        self._van.close(linger_s)
        if self._thread is not None:
            self._thread.join()

    def __repr__(self) -> str:
        names = ", ".join(kind.__name__ for kind in self._handlers)
        return f"<Service of {self._van.node} for {names or 'nothing'}, {len(self._calls)} calls>"

    def _run(self) -> None:
        try:
            while True:
                self.serve()
        except StaleError:  # the van is closed
            return

    def _answered(self, call: _OpenRequest, deadline_ns: int, retry_s: float | None) -> bool:
        """Wait for the answer until the next repetition; return whether it has come."""
        until_ns = deadline_ns
        if retry_s is not None:
            until_ns = min(until_ns, self._van.clock.after_ns(retry_s))

        def is_over() -> bool:
            return call.answer is not None or bool(call.lost)

        while not is_over() and self._receive(until_ns, is_over):
            pass
        if call.answer is None and call.lost:
            _, rank = split_node(call.to)
            msg = f"lost {call.to} before it answered: {call.lost}"
            raise PeerLostError(msg, rank=rank)
        return call.answer is not None

    def _receive(self, deadline_ns: int | None, is_over: Callable[[], bool]) -> bool:
        """Receive and handle one message, or wait for a thread that does; False after deadline."""
        with self._changed:
            while self._is_receiving and not is_over():
                left_s = self._left_s(deadline_ns)
                if left_s is not None and left_s <= 0:
                    return False
                self._changed.wait(left_s)
            if is_over():
                return True
            self._is_receiving = True
        delivery = None
        try:
            delivery = self._van.recv(self._left_s(deadline_ns))
        except CommTimeout:
            return deadline_ns is None
        finally:
            with self._changed:
                if delivery is not None:
                    # before another thread receives: that thread may wait for this answer
                    self._finish_request(delivery)
                self._is_receiving = False
                self._changed.notify_all()
        self._dispatch(delivery)
        return True

    def _finish_request(self, delivery: Delivery) -> None:
        """Give waiting calls their answer or the loss of their peer; the caller holds the lock."""
        if delivery.answers:
            call = self._calls.get(delivery.answers)
            if call is not None and call.to == delivery.sender and call.answer is None:
                call.answer = delivery
        elif isinstance(delivery.message, PeerLost):
            for call in self._calls.values():
                if call.to == delivery.sender:
                    call.losses[delivery.incarnation] = delivery.message.reason
        self._changed.notify_all()

    def _dispatch(self, delivery: Delivery) -> None:
        """Run the handler of a message that is not an answer, unless it has run for this id."""
        if delivery.answers:
            return
        if isinstance(delivery.message, PeerLost):
            handler = self._handlers.get(PeerLost)
            if handler is not None:
                handler(delivery)
            return
        with self._changed:
            memory = self._memories.get(delivery.sender)
            if memory is None or memory.incarnation != delivery.incarnation:
                memory = self._memories[delivery.sender] = _CallerMemory(delivery.incarnation)
            is_new = delivery.id not in memory.answers
            if is_new:
                # while the handler runs, a repetition gets no answer
                memory.answers[delivery.id] = None
                while len(memory.answers) > self._num_remembered:
                    memory.answers.popitem(last=False)
            reply = memory.answers[delivery.id]
        if is_new:
            reply = self._run_handler(delivery)
            with self._changed:
                if delivery.id in memory.answers:
                    memory.answers[delivery.id] = reply
        if reply is not None:
            self._answer(delivery, reply)

    def _left_s(self, deadline_ns: int | None) -> float | None:
        if deadline_ns is None:
            return None
        return max(0.0, (deadline_ns - self._van.clock.now_ns()) / 1e9)

    def _run_handler(self, delivery: Delivery) -> Reply | None:
        message = delivery.message
        handler = self._handlers.get(type(message))
        if handler is None:
            known = ", ".join(kind.__name__ for kind in self._handlers) or "none"
            text = (
                f"{self._van.node} has no handler for {type(message).__name__}, only for: "
                f"{known}. Register one on that node"
            )
            return Reply(Failed("ConfigError", text))
        try:
            answer = handler(delivery)
        except Exception as exc:  # noqa: BLE001 - any exception is reported to the caller
            return Reply(Failed(type(exc).__name__, str(exc)))
        return answer if isinstance(answer, Reply) or answer is None else Reply(answer)

    def _answer(self, delivery: Delivery, reply: Reply) -> None:
        priority = delivery.priority if reply.priority is None else reply.priority
        try:
            self._van.try_send(
                delivery.sender,
                reply.message,
                buffers=reply.buffers,
                priority=priority,
                answers=delivery.id,
            )
        except ConfigError as exc:
            failed = Failed("ConfigError", f"the answer cannot be sent: {exc}")
            self._answer(delivery, Reply(failed, (), delivery.priority))
        except (CommError, StaleError):
            pass  # the caller is gone, or in a later epoch
