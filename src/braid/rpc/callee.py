"""The part of a node that runs the calls of peers, and answers them.

Call ──> find the function, unpack, run, pack ──> CallReply or Raised
└── a future ──> when it completes
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from braid.errors import CommTimeout
from braid.rpc.autograd.contexts import Contexts
from braid.rpc.codec import Codec, Packed, tensors_of
from braid.rpc.functions import is_async_execution
from braid.rpc.messages import AutogradEdge, Call, CallReply, Raised
from braid.rpc.names import is_operator
from braid.rpc.outcomes import Later, awaited, described, is_described, outcome
from braid.rpc.peers import Peers
from braid.rpc.reference_table import References
from braid.rpc.scope import CallSpans, Scope, enter
from braid.runtime.message import Delivery

__all__ = ["Callee"]

LOG = logging.getLogger(__name__)

NOTHING = b"\xc0"  # None in msgpack
NUM_CANCELLED = 1024  # calls whose cancelling is remembered until they begin


@dataclass(eq=False, kw_only=True)
class Callee:
    """Calls of peers that run in a node.

    Attributes:
        peers: Sends the answers.
        codec: Unpacks arguments and packs results.
        references: Values that stay in this node.
        contexts: Contexts of distributed autograd that calls carry.
        spans: Records of the calls.
        act: Function that makes code of its context, see `contextvars`, run for this node.
        cancel_made: Function that cancels a call that this node has made, by its number.
        on_end: Function that is called when a call has been answered.
        num_running: Calls that are not answered; those that wait for a future count.
    """

    peers: Peers
    codec: Codec
    references: References
    contexts: Contexts
    spans: CallSpans
    act: Callable[[], object]
    cancel_made: Callable[[int], object]
    on_end: Callable[[], None]
    num_running: int = 0

    def __post_init__(self) -> None:
        """Begin without calls."""
        self._lock = threading.Lock()
        self._scopes: dict[tuple[int, int], Scope] = {}  # by sender and number of the call
        self._cancelled: deque[tuple[int, int]] = deque(maxlen=NUM_CANCELLED)

    def cancel(self, sender: int, number: int) -> None:
        """Cancel a call of a peer: it does not begin, or learns it by `rpc.is_cancelled`."""
        with self._lock:
            scope = self._scopes.get((sender, number))
            if scope is None:
                self._cancelled.append((sender, number))
                return
            scope.is_cancelled = True
            calls = list(scope.calls)
        for each in calls:
            self.cancel_made(each)

    def lost(self, sender: int) -> None:
        """Let the calls of a lost peer learn that nobody waits for them, by `rpc.is_cancelled`."""
        with self._lock:
            kept = [each for each in self._cancelled if each[0] != sender]
            self._cancelled = deque(kept, NUM_CANCELLED)
            for (peer, _), scope in self._scopes.items():
                if peer == sender and not scope.is_kept:
                    scope.is_cancelled = True

    def run(self, delivery: Delivery, call: Call, sender: int, arrived_ns: int) -> None:
        """Run a call that came at a time, and answer it now or when its future completes."""
        creation = call.creation
        if creation is not None:
            if sender != self.peers.info.id:
                self.references.accept(creation.ref, creation.fork, sender, creation.oldest_open)
            self._reply(delivery, sender, Packed(NOTHING, []), None)
        key = sender, delivery.id
        until_ns = arrived_ns + round(call.timeout_s * 1e9) if call.timeout_s else None
        scope = Scope(until_ns, is_kept=creation is not None)
        with self._lock:
            if key in self._cancelled:
                self._cancelled.remove(key)
                scope.is_cancelled = True
            self._scopes[key] = scope
            self.num_running += 1
        value, error = None, None
        span = self.spans.serve(call.function, sender, delivery.id, arrived_ns)
        try:
            value = copy_context().run(self._execute, call, delivery, sender, scope)
        except BaseException as exc:  # noqa: BLE001 - the caller must learn it
            error = exc
        if span is not None:
            span.end()
        if type(value) is Later:  # a value may say anything of its class
            answer = partial(self._finish, delivery, call, sender)
            value.future.add_done_callback(lambda done: answer(*outcome(done)))
        else:
            self._finish(delivery, call, sender, value, error)
        del error  # it holds this frame, and with it the arguments

    def _execute(self, call: Call, delivery: Delivery, sender: int, scope: Scope) -> Any:
        """Run the function of a call, in a context of its own."""
        self.act()
        enter(scope)
        if call.edge is None:
            return self._result(call, delivery, sender, scope)
        with self.contexts.entered(call.edge):
            return self._result(call, delivery, sender, scope)

    def _result(self, call: Call, delivery: Delivery, sender: int, scope: Scope) -> Any:
        tensors = tensors_of(call.body, delivery.buffers)
        tensors = self.contexts.incoming(call.edge, tensors, sender)
        args, kwargs = self.codec.unpack(
            call.body.packed, tensors, delivery.sender, will_answer=call.creation is None
        )
        del tensors
        if scope.is_cancelled:  # after the arguments, too
            msg = f"{call.function} was cancelled before it began"
            raise CancelledError(msg)
        if scope.deadline_ns is not None and self.peers.now_ns() >= scope.deadline_ns:
            msg = f"{call.function} did not begin in time: {self.peers.info.name} was busy"
            raise CommTimeout(msg)
        function = self.codec.names.find(call.function)  # last: references of arguments must arrive
        try:
            result = function(*args, **kwargs)
        except TypeError as exc:
            if is_operator(function):  # torch finds no operator for such arguments
                raise RuntimeError(str(exc)) from exc
            raise
        if is_async_execution(function) and not isinstance(result, Later):
            return awaited(result)
        return result

    def _finish(
        self,
        delivery: Delivery,
        call: Call,
        sender: int,
        value: Any,
        error: BaseException | None,
    ) -> None:
        """Answer a call, or keep its result; a node that has ended leaves that to its loss."""
        try:
            if self.peers.is_closed:
                return
            if error is None and call.creation is not None:
                self.references.set_value(call.creation.ref, value, None)
            elif error is not None or (error := self._answer(delivery, call, sender, value)):
                self._raise(delivery, call, sender, error)
        finally:
            with self._lock:
                del self._scopes[sender, delivery.id]
                self.num_running -= 1
            self.on_end()

    def _raise(self, delivery: Delivery, call: Call, sender: int, error: BaseException) -> None:
        """Answer a call by an error, or keep it in place of the result."""
        name = self.codec.names.exception_name(error)
        is_new = not is_described(self.peers.info.name, error)
        own, text = described(self.peers.info.name, error)
        if is_new and not issubclass(type(error), CancelledError):
            LOG.warning("%s, called by node %d, failed: %s", call.function, sender, text)
        if call.creation is not None:
            self.references.set_value(call.creation.ref, None, own)
        else:
            self.peers.transmit(sender, Raised(name, text), answers=delivery.id)

    def _answer(
        self, delivery: Delivery, call: Call, sender: int, value: Any
    ) -> BaseException | None:
        """Send the result; return the error if it cannot travel."""
        try:
            packed = self.codec.pack(value, sender, "the result")
            edge = None
            if call.edge is not None:
                with self.contexts.entered(call.edge):
                    edge = self.contexts.outgoing(packed.tensors, sender)
            self._reply(delivery, sender, packed, edge)
        except BaseException as exc:  # noqa: BLE001 - whatever it is, the caller must learn it
            return exc
        return None

    def _reply(
        self, delivery: Delivery, to: int, packed: Packed, edge: AutogradEdge | None
    ) -> None:
        body, buffers = packed.as_body()
        self.peers.transmit(to, CallReply(body, edge), buffers, answers=delivery.id)
