"""A node of remote calls: the van, the parts that use it, and which part a message is for.

    caller                                             callee
    pack arguments ── Call ──> van ── a thread of its pool: find, unpack, run, pack
    the future completes    <── CallReply or Raised ──────────┘

The thread that waits for an answer receives it itself; see `turns`. A call has a deadline, and a
lost peer fails all calls that it was to answer.

Source: A. Birrell, B. Nelson, "Implementing Remote Procedure Calls", ACM TOCS 1984.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch

from braid.errors import (
    BraidError,
    CommError,
    CommTimeout,
    ConfigError,
    PeerLostError,
    RendezvousError,
    StaleError,
)
from braid.rpc.all_gather import AllGathers
from braid.rpc.autograd.contexts import Contexts
from braid.rpc.callee import Callee
from braid.rpc.caller import Caller
from braid.rpc.codec import Codec, tensors_of
from braid.rpc.devices import place_of
from braid.rpc.messages import Body, Call, CallReply, CancelCall, Raised
from braid.rpc.names import Names
from braid.rpc.options import RpcOptions
from braid.rpc.protocol.autograd_state import AutogradMessage
from braid.rpc.protocol.references_state import Fork
from braid.rpc.references import References
from braid.rpc.scope import CallSpans
from braid.rpc.turns import Turns
from braid.rpc.workers import WorkerDirectory, WorkerInfo, node_of
from braid.runtime.message import Delivery, Message, PeerLost, Van, split_node
from braid.runtime.store import HashStore, Store
from braid.runtime.transport.reachability import probe
from braid.runtime.wire import Buffer

if TYPE_CHECKING:
    from braid.rpc.streams import Stream

__all__ = ["Agent"]

LOG = logging.getLogger(__name__)

Future = torch.futures.Future
_CONNECT_S = 10.0
_PROBE_S = 3.0  # for a node that has been here to accept a connection
_AGAIN_S = 0.5  # for one that was lost, or could not be reached
_PAUSE_S = 2.0  # between two attempts to reach such a node; calls fail immediately meanwhile
_AUTOGRAD = get_args(AutogradMessage)


class _Unreachable(NamedTuple):
    """A node that could not be reached.

    Attributes:
        address: Address that was tried.
        again_ns: Time of the next attempt.
        reason: Reason in a few words.
    """

    address: str
    again_ns: int
    reason: str


class Agent:
    """A node.

    Args:
        van: Its van, owned and closed by this object.
        info: Name and number of the node.
        directory: Records of all nodes.
        options: Choices.
        spans: Records of its calls; of none when None.

    Attributes:
        timeout_s: Deadline of calls that are given none; 0 for never.
    """

    def __init__(
        self,
        van: Van,
        info: WorkerInfo,
        directory: WorkerDirectory,
        options: RpcOptions,
        spans: CallSpans | None = None,
    ) -> None:
        self.info = info
        self.options = options
        self.directory = directory
        self._van = van
        self.timeout_s = options.rpc_timeout
        self.world_size: int | None = None
        self.store: Store = HashStore()
        self.resources = contextlib.ExitStack()  # closed with the node
        self.is_closed = False
        self.lost_nodes: set[int] = set()
        self._reached: set[int] = set()
        self._unreachable: dict[int, _Unreachable] = {}
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.spans = spans or CallSpans(None, info.id)
        self._turns = Turns(
            van,
            self._handle,
            self._handle_at_once,
            self._tick,
            lambda each: isinstance(each.message, Call),
            options.num_worker_threads,
        )
        self.caller = Caller(self, van, self._turns)
        self.callee = Callee(self)
        self.references = References(self)
        self.contexts = Contexts(self)
        self.names = Names(options.allowed_modules, is_open=options.allow_pickle)
        self.all_gathers = AllGathers()
        self.codec = Codec(
            self.names,
            lambda value, to: self.references.share(value, split_node(to)[1]),
            self.references.unshare,
            lambda data, sender, will_answer: self.references.receive(
                data, split_node(sender)[1], will_answer=will_answer
            ),
            lambda device, to: place_of(
                device, info.name, options.device_maps, directory.find(split_node(to)[1])
            ),
            allow_pickle=options.allow_pickle,
        )
        self._turns.start()

    def notify_if_idle(self) -> None:
        """Let those look again who wait until nothing is under way."""
        if not self.num_under_way:
            self._turns.notify()

    @property
    def incarnation(self) -> int:
        """Number of this life of the node."""
        return self._van.incarnation

    # -- for its parts

    def now_ns(self) -> int:
        """Return the time on the clock of deadlines."""
        return self._van.clock.now_ns()

    def wait_for(self, future: Future[Any], timeout: float) -> Any:
        """Wait for a future, and receive meanwhile; 0 for no deadline, -1 for the node's own."""
        if future.done():
            return future.value()
        if self.is_closed:
            raise self._ended()
        seconds = self.timeout_s if timeout < 0 else timeout
        future.add_done_callback(lambda _: self._turns.notify())
        if not self._turns.wait(future.done, seconds or None, lambda _: False):
            msg = f"a value of {self.info.name} was not made within {seconds:g} s"
            raise CommTimeout(msg)
        return future.value()

    def wait_until(self, is_over: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for a condition that messages of autograd change; see `Turns.wait`."""
        return self._turns.wait(
            is_over, timeout_s, lambda each: isinstance(each.message, _AUTOGRAD), is_quick=False
        )

    def notify(self) -> None:
        """Let threads that wait look at their conditions again."""
        self._turns.notify()

    def transmit(
        self,
        to: int,
        message: Message,
        buffers: Sequence[Buffer] = (),
        *,
        answers: int = 0,
        number: int = 0,
    ) -> None:
        """Send a message; a node that is gone is reported by its loss."""
        try:
            self.send(to, message, buffers, answers, number)
        except (PeerLostError, RendezvousError):
            self.undelivered(to)
        except BraidError as exc:  # nobody here waits for it
            if not self.is_closed:
                LOG.warning("%s could not send to node %d: %s", self.info.name, to, exc)

    def pack(self, value: Any, to: int) -> tuple[Body, list[memoryview]]:
        """Pack a value for another node."""
        return self.codec.pack(value, node_of(to)).as_body()

    def unpack(self, body: Body, buffers: Sequence[memoryview], sender: int) -> Any:
        """Return the value of a message."""
        return self.codec.unpack(body.packed, tensors_of(body, buffers), node_of(sender))

    def infos(self) -> list[WorkerInfo]:
        """Return all nodes that are known here."""
        return [WorkerInfo(each.name, each.id) for each in self.directory.known]

    # -- the end

    @property
    def num_under_way(self) -> int:
        """Number of calls of this node that are unanswered, and of peers' calls that run here."""
        return len(self.caller) + self.callee.num_running

    def is_alive(self, number: int) -> bool:
        """Whether a node can be reached; connects to it if need be, so that its loss shows."""
        if number in self.lost_nodes:
            return False
        if number != self.info.id and not self._van.is_connected(node_of(number)):
            try:
                address = self.directory.find(number).address
                self._van.connect(node_of(number), address, timeout_s=_PROBE_S)
            except (CommError, RendezvousError, ConfigError):
                self.lost_nodes.add(number)
                return False
        return True

    def wait_idle(self, timeout_s: float | None) -> bool:
        """Wait until nothing is under way; False at the deadline."""
        return self._turns.wait(lambda: not self.num_under_way, timeout_s, lambda _: False)

    def close(self) -> None:
        """End the node; calls under way fail. Idempotent."""
        self.is_closed = True
        self.caller.fail_all()
        self._van.close()
        self.caller.fail_all()  # calls that were just being sent
        self._turns.close()
        self.references.close()
        self.resources.close()

    # -- sending

    def send(
        self, to: int, message: Message, buffers: Sequence[Buffer], answers: int, number: int
    ) -> None:
        """Send a message; connect first if need be.

        Raises:
            PeerLostError: The node was lost, and cannot be reached again.
            RendezvousError: The node cannot be reached, at the first attempt or shortly after it.
        """
        if self.is_closed:
            raise self._ended()
        if to == self.info.id:
            copies = [memoryview(bytearray(each)) for each in buffers]
            number = number or self._van.new_id()
            delivery = Delivery(
                self._van.node, message, copies, number, self.incarnation, answers=answers
            )
            self._turns.submit(delivery)
            return
        node = node_of(to)
        if not self._van.is_connected(node):
            is_first = isinstance(message, Call) or (  # others go to nodes that were connected
                isinstance(message, Fork) and to not in self.lost_nodes
            )
            if answers or not is_first:
                self.undelivered(to)
                return
            self._connect(to, _CONNECT_S if isinstance(message, Call) else _PROBE_S)
        self._reached.add(to)
        self._van.send(node, message, buffers=buffers, answers=answers, message_id=number)

    def _ended(self) -> StaleError:
        """Return the error for a call, or a value, of a node that has ended."""
        msg = (
            f"the node {self.info.name} has ended by rpc.shutdown(), and its references with it: "
            "use them before, or call rpc.init_rpc() and make them again"
        )
        return StaleError(msg)

    def _connect(self, to: int, within_s: float) -> None:
        """Connect to a node; one that was out of reach is tried again once in `_PAUSE_S` only."""
        record = self.directory.find(to)
        is_lost = to in self.lost_nodes or to in self._reached  # its loss may not be known yet
        known = self._unreachable.get(to)
        if known is not None and known.address != record.address:
            known = None
        if known is None or known.again_ns <= self.now_ns():
            is_again = is_lost or known is not None
            reason = self._reach(
                to, record.address, _AGAIN_S if is_again else within_s, is_again=is_again
            )
            if not reason:
                self._unreachable.pop(to, None)
                return
            again_ns = self.now_ns() + round(_PAUSE_S * 1e9)
            known = self._unreachable[to] = _Unreachable(record.address, again_ns, reason)
        if is_lost:
            msg = f"{record.name} is lost, and cannot be reached again: {known.reason}"
            raise PeerLostError(msg, rank=to)
        msg = f"{record.name} cannot be reached: {known.reason}"
        raise RendezvousError(msg)

    def _reach(self, to: int, address: str, within_s: float, *, is_again: bool) -> str:
        """Connect to a node; return the reason if that fails."""
        if is_again:  # a connection would try again until its deadline
            failed = probe({to: address}, self._van.clock, timeout_s=within_s)
            if failed:
                return failed[to]
        try:
            self._van.connect(node_of(to), address, timeout_s=within_s)
        except RendezvousError as exc:
            return str(exc)
        return ""

    def undelivered(self, to: int) -> None:
        """Let go the references that a message to a node which is gone has carried."""
        if not self.is_closed:
            self.references.lost(to)

    # -- receiving

    def _handle_at_once(self, delivery: Delivery) -> bool:
        """Handle a message that overtakes others; return whether it is one."""
        if not isinstance(delivery.message, CancelCall):
            return False
        self.callee.cancel(split_node(delivery.sender)[1], delivery.message.call)
        return True

    def _handle(self, delivery: Delivery, arrived_ns: int) -> None:
        """Handle a message that came at a time; in any thread."""
        _, sender = split_node(delivery.sender)
        message = delivery.message
        if isinstance(message, PeerLost):
            self._lost(sender, "it called rpc.shutdown()" if message.orderly else message.reason)
            return
        if self.lost_nodes:
            self.lost_nodes.discard(sender)
        if isinstance(message, Call):
            self.callee.run(delivery, message, sender, arrived_ns)
        elif isinstance(message, CallReply | Raised):
            self.caller.answered(delivery, message, sender)
        elif isinstance(message, _AUTOGRAD):
            self.contexts.on_message(sender, message, delivery.buffers)
        else:
            self.references.on_message(sender, message)  # type: ignore[arg-type]

    def _lost(self, process: int, reason: str) -> None:
        self.lost_nodes.add(process)
        known = next((each.name for each in self.directory.known if each.id == process), "")
        name = known or str(process)
        self.caller.lost(process, f"lost {name} before it answered: {reason}")
        self.callee.lost(process)
        self.references.lost(process)
        self.contexts.lost(process, f"lost {name}: {reason}")
        self.directory.forget(process)

    def _tick(self) -> None:
        """Do what is due; called often."""
        self.references.collect()
        self.caller.tick()
