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

import torch

from braid.errors import CommTimeout
from braid.rpc.autograd.contexts import Contexts
from braid.rpc.bodies import Packed, tensors_of
from braid.rpc.codec import Codec
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
NUM_CANCELLED = 1024  # cancelled calls that are remembered until they begin


@dataclass(eq=False, kw_only=True)
class Callee:
    """Calls of peers that run in a node.

    Attributes:
        peers: Sends the answers.
        codec: Unpacks arguments and packs results.
        references: Values that stay in this node.
        contexts: Contexts of distributed autograd that calls carry.
        spans: Records of the calls.
        act: Function that makes this node the current node of the running `contextvars` context.
        cancel_made: Function that cancels a call that this node has made, by its number.
        on_end: Function that is called when a call has been answered.
        num_running: Calls that are not answered, including calls that wait for a future.
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
        """Cancel a call of a peer, given by the number of its message.

        A call that has not begun is skipped; in a running one, `rpc.is_cancelled` returns True.
        """
        with self._lock:
            scope = self._scopes.get((sender, number))
            if scope is None:
                self._cancelled.append((sender, number))
                return
            scope.is_cancelled = True
            calls = list(scope.calls)
        for call in calls:
            self.cancel_made(call)

    def lost(self, sender: int) -> None:
        """Make `rpc.is_cancelled` return True in calls of a lost peer."""
        with self._lock:
            kept = [key for key in self._cancelled if key[0] != sender]
            self._cancelled = deque(kept, NUM_CANCELLED)
            for (peer, _), scope in self._scopes.items():
                if peer == sender and not scope.is_kept:
                    scope.is_cancelled = True

    def run(self, delivery: Delivery, call: Call, sender: int, arrived_ns: int) -> None:
        """Run a call that arrived at `arrived_ns`; answer it now or when its future completes."""
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
        except BaseException as exc:  # noqa: BLE001 - the caller must receive it
            error = exc
        if span is not None:
            span.end()
        if type(value) is Later:  # a value may override `__class__`
            answer = partial(self._finish, delivery, call, sender)
            value.future.add_done_callback(lambda future: answer(*outcome(future)))
        else:
            self._finish(delivery, call, sender, value, error)
        del error  # it holds this frame, and with it the arguments

    def _execute(self, call: Call, delivery: Delivery, sender: int, scope: Scope) -> Any:
        """Run the function of a call; runs in a copy of the contextvars context."""
        self.act()
        enter(scope)
        if call.edge is None:
            return self._result(call, delivery, sender, scope)
        self.contexts.enter(call.edge)
        with torch.set_grad_enabled(call.edge.is_recording):
            return self._result(call, delivery, sender, scope)

    def _result(self, call: Call, delivery: Delivery, sender: int, scope: Scope) -> Any:
        tensors = tensors_of(call.body, delivery.buffers)
        tensors = self.contexts.incoming(call.edge, tensors, sender)
        args, kwargs = self.codec.unpack(
            call.body.packed, tensors, delivery.sender, will_answer=call.creation is None
        )
        del tensors
        if scope.is_cancelled:  # after the arguments, too
            msg = f"{call.function} was cancelled by the caller before it began"
            raise CancelledError(msg)
        if scope.deadline_ns is not None and self.peers.now_ns() >= scope.deadline_ns:
            msg = (
                f"{call.function} did not begin before its deadline: all threads of "
                f"{self.peers.info.name} were busy. Raise num_worker_threads there, or the timeout"
            )
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
        """Answer a call, or keep its result; do neither if the node is closed."""
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
        """Answer a call with an error, or keep the error as the value of its reference."""
        name = self.codec.names.exception_name(error)
        is_new = not is_described(self.peers.info.name, error)
        kept_error, text = described(self.peers.info.name, error)
        if is_new and not issubclass(type(error), CancelledError):
            LOG.warning("%s, called by node %d, failed: %s", call.function, sender, text)
        if call.creation is not None:
            self.references.set_value(call.creation.ref, None, kept_error)
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
                edge = self.contexts.outgoing(packed.tensors, sender, call.edge)
            self._reply(delivery, sender, packed, edge)
        except BaseException as exc:  # noqa: BLE001 - the caller must receive any error
            return exc
        return None

    def _reply(
        self, delivery: Delivery, to: int, packed: Packed, edge: AutogradEdge | None
    ) -> None:
        body, buffers = packed.as_body()
        self.peers.transmit(to, CallReply(body, edge), buffers, answers=delivery.id)
