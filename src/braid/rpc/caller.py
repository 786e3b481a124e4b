"""The part of a node that makes calls: sends them, and completes them when they are answered.

find the node, pack, deadline ── Call ──> callee
the future completes <── CallReply or Raised ──┘      or: lost, late, cancelled

Each call is sent once, except calls of functions marked as idempotent; see `pending`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function

from braid.errors import (
    CommError,
    CommTimeout,
    PeerLostError,
    RendezvousError,
    StaleError,
)
from braid.rpc.autograd.contexts import Contexts
from braid.rpc.bodies import tensors_of
from braid.rpc.codec import Codec
from braid.rpc.leader_followers import LeaderFollowers
from braid.rpc.messages import Call, CallReply, CancelCall, Creation, Raised
from braid.rpc.options import RpcOptions
from braid.rpc.outcomes import AnswerFuture, CallOutcome, RpcError, error_like
from braid.rpc.peers import Peers
from braid.rpc.pending import Finish, PendingCall, PendingCalls, Retries, is_idempotent
from braid.rpc.protocol.reference_messages import Id
from braid.rpc.reference_table import References
from braid.rpc.scope import CallSpans, current_scope, deadline_ns
from braid.rpc.workers import To, WorkerInfo, WorkerRecord
from braid.runtime.message import Delivery
from braid.runtime.torch_internals import end_with_future, is_profiling

__all__ = ["Caller", "OutgoingCall"]

Future = torch.futures.Future


class OutgoingCall(NamedTuple):
    """Arguments of a remote call, as passed by the program.

    Attributes:
        to: Node to call.
        function: Function to call on that node.
        args: Arguments of the function.
        kwargs: Keyword arguments of the function.
        timeout: Seconds to wait for the answer; 0 for no limit, negative for the node's default.
    """

    to: To
    function: Callable[..., Any]
    args: Sequence[Any] | None = ()
    kwargs: Mapping[str, Any] | None = None
    timeout: float = -1.0


@dataclass(eq=False)
class Caller:
    """Makes the calls of a node: sends them, and completes their results.

    Attributes:
        peers: Sends the calls.
        pool: Threads that receive.
        codec: Packs arguments and unpacks results.
        references: References that calls carry.
        contexts: Contexts of distributed autograd that calls carry.
        spans: Records of the calls.
        options: Choices of the node.
    """

    peers: Peers
    pool: LeaderFollowers
    codec: Codec
    references: References
    contexts: Contexts
    spans: CallSpans
    options: RpcOptions

    def __post_init__(self) -> None:
        """Begin without calls."""
        self._pending = PendingCalls(self.pool)
        self._retries = Retries()
        # of calls; answers to an earlier process of this node may still arrive, so numbers differ
        self._numbers = itertools.count((self.peers.incarnation % (1 << 30) << 32) + 1)
        self._brought: dict[
            int, tuple[int, list[Id]]
        ] = {}  # forks returned to their owner, by call

    def __len__(self) -> int:
        """Return the number of calls that are not answered."""
        return len(self._pending) + len(self._retries)

    @property
    def num_begun(self) -> int:
        """Number of calls that the node has made."""
        return self._pending.num_begun

    def call_sync(self, call: OutgoingCall) -> Any:
        """Call a function in another node and return its result.

        Raises:
            Exception: The function's exception, with the callee's traceback in its text.
            CommTimeout: No answer came in time.
            PeerLostError: The node is lost.
            ConfigError: The node does not exist, or an argument cannot be sent.
        """
        outcome = CallOutcome()
        self._send_call(call, outcome.finish, waiter=outcome)
        self.pool.wait(lambda: outcome.is_here, None, self._pending.is_quick, outcome)
        error, outcome.error = outcome.error, None
        if error is None:
            return outcome.value
        try:
            raise error
        finally:
            del error  # it holds this frame, and with it the arguments

    def call_each(self, calls: Iterable[OutgoingCall]) -> list[CallOutcome]:
        """Call functions in other nodes at the same time; return when all have ended."""
        outcomes: list[CallOutcome] = []
        for call in calls:
            outcomes.append(CallOutcome())
            self._send_call(call, outcomes[-1].finish, waiter=id(outcomes))
        self.pool.wait(
            lambda: all(outcome.is_here for outcome in outcomes),
            None,
            self._pending.is_quick,
            id(outcomes),
        )
        return outcomes

    def call_async(self, call: OutgoingCall) -> Future[Any]:
        """Call a function in another node; the future has its result. See `call_sync`."""
        future = AnswerFuture()
        future.on_cancel = self._send_call(call, future.finish)
        self.pool.expect()
        return future

    def create(self, call: OutgoingCall) -> tuple[Id, Id, WorkerInfo]:
        """Call a function in another node, where its result stays.

        Returns:
            Number of the reference, number of this node's fork (use) of it, and the owning node.
        """
        record = self.peers.directory.find(call.to)
        ref, fork = self.references.new_remote(record.id)

        def finish(value: Any, error: BaseException | None) -> None:
            del value
            self.references.created(fork, error)

        creation = Creation(ref, fork, self.references.oldest_open)
        try:
            self._send_call(call, finish, creation)
        except BaseException:
            self.references.created(fork)  # the call was not sent, and no handle exists
            self.references.released.append((ref, fork))
            raise
        return ref, fork, WorkerInfo(record.name, record.id)

    def cancel(self, number: int) -> bool:
        """Cancel this node's call with a number; return whether the call had no answer yet."""
        call = self._pending.get(number)
        if call is None:
            return False
        self.peers.transmit(call.to, CancelCall(number))
        name = self.peers.directory.find(call.to).name
        error = CancelledError(f"the call of {call.name} in {name} was cancelled")
        self._pending.finish(number, None, error)
        return True

    # -- ends

    def _come_home(self, call: int) -> None:
        """Release forks that this call returned to their owner, once it was delivered or lost."""
        brought = self._brought.pop(call, None)
        if brought is not None:
            self.references.confirmed(brought[1])

    def answered(self, delivery: Delivery, message: CallReply | Raised, sender: int) -> None:
        """Complete a call with the answer of its callee."""
        self._come_home(delivery.answers)
        if isinstance(message, Raised):
            kind = self.codec.names.exception_of(message.error) or RuntimeError
            self._pending.finish(delivery.answers, None, error_like(kind, message.text))
            return
        try:
            tensors = tensors_of(message.body, delivery.buffers)
            tensors = self.contexts.incoming(message.edge, tensors, sender)
            value = self.codec.unpack(message.body.packed, tensors, delivery.sender)
        except BaseException as exc:  # noqa: BLE001 - the caller must receive any error
            self._pending.finish(delivery.answers, None, exc)
            return
        self._pending.finish(delivery.answers, value, None)

    def lost(self, process: int, text: str) -> None:
        """Fail the calls to a lost node."""
        self._pending.fail(
            lambda call: call.to == process, lambda _: PeerLostError(text, rank=process)
        )
        for call in [number for number, (to, _) in list(self._brought.items()) if to == process]:
            self._come_home(call)

    def fail_all(self) -> None:
        """Fail all calls, because the node ends."""
        error = StaleError(f"{self.peers.info.name} was shut down before an answer came")
        self._pending.fail(lambda _: True, lambda _: error)
        self._retries.fail(error)

    def tick(self) -> None:
        """Fail calls past their deadline, and resend idempotent calls that are due."""
        now_ns = self.peers.now_ns()
        self._retries.tick(now_ns)
        self._pending.fail(
            lambda call: call.deadline_ns is not None and call.deadline_ns <= now_ns, self._late
        )

    def _late(self, call: PendingCall) -> CommTimeout:
        name = self.peers.directory.find(call.to).name
        text = (
            f"{name} did not answer {call.name} in time, as it runs long or waits for another "
            "call: raise the timeout. Nested calls deeper than RpcOptions(num_worker_threads=) "
            "never end"
        )
        return CommTimeout(text)

    # -- sending

    def _send_call(
        self,
        asked: OutgoingCall,
        finish: Finish,
        creation: Creation | None = None,
        *,
        waiter: object = None,
    ) -> Callable[[], bool]:
        """Send a call; return a function that cancels it, see `cancel`."""
        row: Future[None] | None = None
        if is_profiling():
            kind = "remote" if creation else "rpc_async" if waiter is None else "rpc_sync"
            row = self._begin_profiler_row(kind, asked)
            finish = partial(_end_profiler_row, row, finish)
        try:
            if creation is None and is_idempotent(asked.function):
                return self._send_until_answered(asked, finish)
            number = self._send_once(asked, finish, creation, waiter)
        except BaseException:
            if row is not None:
                row.set_result(None)
            raise
        return partial(self.cancel, number)

    def _begin_profiler_row(self, kind: str, asked: OutgoingCall) -> Future[None]:
        """Begin a row of `torch.profiler`; the row ends when the returned future has a result.

        The answer may arrive in a thread without a profiler, so the row cannot simply be closed.
        """
        name = self.codec.names.name_of(asked.function)
        callee = self.peers.directory.find(asked.to).name
        row = record_function(f"{kind}#{name}({self.peers.info.name} -> {callee})")
        row.__enter__()  # type: ignore[no-untyped-call]
        is_over: Future[None] = Future()
        end_with_future(row, is_over)
        return is_over

    def _send_until_answered(self, asked: OutgoingCall, finish: Finish) -> Callable[[], bool]:
        """Send a call, and again when its node is lost, until its deadline.

        Returns:
            Function that cancels the attempt under way; see `cancel`.
        """
        name = self.codec.names.name_of(asked.function)
        until_ns = self._deadline_ns(name, asked.timeout, self.peers.now_ns())
        context, numbers = copy_context(), [0]  # a thread with another context may resend it

        def send(on_end: Finish) -> None:
            try:
                self.peers.directory.find(asked.to)
            except RpcError as exc:  # no node has that name now
                on_end(None, PeerLostError(str(exc)))
                return
            left_s = 0.0 if until_ns is None else max(1e-9, (until_ns - self.peers.now_ns()) / 1e9)
            again = asked._replace(timeout=left_s)
            numbers[0] = context.copy().run(self._send_once, again, on_end)

        def on_end(value: Any, error: BaseException | None) -> None:
            finish(value, error)
            self.pool.notify()

        self._retries.attempt(send, on_end, until_ns, self.peers.now_ns)
        return lambda: self.cancel(numbers[0])

    def _send_once(
        self,
        asked: OutgoingCall,
        finish: Finish,
        creation: Creation | None = None,
        waiter: object = None,
    ) -> int:
        """Send a call, and return its number."""
        to, function, args, kwargs, timeout = asked
        record = self.peers.directory.find(to)
        if isinstance(function, MethodType) and not isinstance(function.__self__, type):
            method = function  # the callee needs its object as the first argument
            function, args = method.__func__, (method.__self__, *(args or ()))
        name = self.codec.names.name_of(function)
        now_ns = self.peers.now_ns()
        until_ns = self._deadline_ns(name, timeout, now_ns)
        self.references.collect()
        if self._pending.count(record.id) >= self.options.max_unanswered:
            self._wait_for_room(record, name, until_ns)
        values = [list(args or ()), dict(kwargs or ())]
        packed = self.codec.pack(values, record.id, f"an argument of {name}")
        edge = self.contexts.outgoing(packed.tensors, record.id)
        body, buffers = packed.as_body()
        number = next(self._numbers)
        left_s = 0.0 if until_ns is None else (until_ns - now_ns) / 1e9
        message = Call(name, body, creation, edge, left_s)
        span = self.spans.call(name, record.id, number)
        call = PendingCall(record.id, name, until_ns, finish, waiter, current_scope(), span)
        self._pending.add(number, call)
        if packed.shared and creation is None and record.id != self.peers.info.id:
            going = [Id(*child) for _, child, _, owner in packed.shared if owner == record.id]
            self._brought[number] = record.id, going
        try:
            self.peers.send(record.id, message, buffers, number=number)
        except (CommError, RendezvousError) as exc:
            if not isinstance(exc, CommTimeout):
                self.peers.undelivered(record.id)
            self._come_home(number)
            self._pending.finish(number, None, exc)
        except BaseException:
            self._come_home(number)
            self._pending.take(number)
            raise
        return number

    def _deadline_ns(self, name: str, timeout: float, now_ns: int) -> int | None:
        return deadline_ns(name, self.options.rpc_timeout if timeout < 0 else timeout, now_ns)

    def _wait_for_room(self, to: WorkerRecord, name: str, until_ns: int | None) -> None:
        """Wait until fewer than `max_unanswered` calls to a node are unanswered."""
        limit = self.options.max_unanswered
        left_s = None if until_ns is None else max(0.0, (until_ns - self.peers.now_ns()) / 1e9)

        def has_room() -> bool:
            return self._pending.count(to.id) < limit or self.peers.is_closed

        if not self.pool.wait(has_room, left_s, self._pending.is_quick):
            msg = (
                f"{name} was not called, as {to.name} has not answered {limit:,} calls of this "
                "node. Wait for results, or raise max_unanswered"
            )
            raise CommTimeout(msg)


def _end_profiler_row(
    row: Future[None], finish: Finish, value: Any, error: BaseException | None
) -> None:
    row.set_result(None)
    finish(value, error)
