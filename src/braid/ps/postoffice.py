"""The post office of a node: its van, its directory, and the handlers of its messages.

    van ── deliveries ──> Postoffice ──> handler of the message's type: Server, Scheduler, Customer
                               └── NodeLinks: connects to nodes when they are needed

One thread at a time receives, in `wait_until` or `poll`. Handlers run in that thread with the lock
held, one at a time, so that they need no other lock.

Source: the Postoffice of PS-Lite; M. Li et al., Parameter Server, OSDI 2014.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from braid.errors import BraidError, CommTimeout, PeerLostError, RendezvousError, StaleError
from braid.ps.explained import explained
from braid.ps.links import NodeLinks
from braid.ps.messages import (
    Explain,
    Explained,
    Failure,
    Here,
    Leave,
    NodeJoin,
    RequestRefused,
    StopAt,
    ValuesAnswer,
)
from braid.ps.protocol.directory import SCHEDULER, Directory
from braid.ps.waits import Waits
from braid.runtime.events import Recorder, Span
from braid.runtime.message import Delivery, Message, PeerLost, Van, split_node
from braid.runtime.message.guard import Guard
from braid.runtime.wire import Buffer

__all__ = ["Handler", "Postoffice"]

TICK_S = 0.25  # between two ticks, and the longest sleep
SHORT_NS = 1_000_000  # shorter waits are not described for reports of hangs
JOIN_S = 10.0  # to reach the scheduler, which listens before others know its address
Handler: TypeAlias = Callable[[Delivery], None]
Views: TypeAlias = list[memoryview]
Memory: TypeAlias = Callable[[int, Sequence[int], tuple[int, ...]], "Views | None"]


class Postoffice:
    """Sends and receives the messages of a node, and connects to other nodes.

    Args:
        van: Connections of the node to other nodes; closed by `close`.
        scheduler: Address of the scheduler; empty for the scheduler itself.
        start: First clock of a worker that joins a running job.
        resend_s: Seconds after which unanswered messages are sent again, on links that lose some.
        events: Recorder of waits and pushes; a private one when None.
        ranks: Rank of each node, for reports of waits.

    Attributes:
        node: Name of this node.
        links: Links to other nodes.
        lock: Lock under which handlers run; threads hold it to make requests.
        expected: Handlers of the answers to messages, by the number of the message.
        new_id: Returns a request number that no process of this node has used before.
        scheduler: Address of the scheduler.
        resend_s: Seconds after which unanswered messages are sent again; None on reliable links.
    """

    def __init__(
        self,
        van: Van,
        scheduler: str = "",
        *,
        start: int = 0,
        resend_s: float | None = None,
        events: Recorder | None = None,
        ranks: Mapping[str, int] = {},
    ) -> None:
        self.van, self.node = van, van.node
        self.events = events or Recorder()
        self.waits = Waits(self.events, van.clock, ranks)
        self.links = NodeLinks(van, self._address_of)
        self.directory: Directory | None = None
        self.epoch = -1  # of the directory
        self.failure = ""
        self.is_removed = False  # whether the run goes on without this node
        self.stop_at: int | None = None
        self.scheduler, self.resend_s = scheduler, resend_s
        self._start = start
        self._handlers: dict[type[Message], Handler] = dict.fromkeys(
            (Here, Failure, StopAt, Explain), self._handle_own
        )
        self._on_directory: list[Callable[[Directory], None]] = []
        self._on_lost: list[Callable[[str], None]] = []
        self._on_linked: list[Callable[[str], None]] = []
        self._on_resend: list[Callable[[], None]] = []
        self._on_tick: list[Callable[[], None]] = []
        self._waiting: list[Callable[[], list[str]]] = []
        self._memory: list[Memory] = []
        self.tables: dict[str, tuple[str, int]] = {}  # form and checksum, for the scheduler
        self.expected: dict[int, Handler] = {}
        self._soon: deque[Callable[[], None]] = deque()
        self._announced = 0  # number of the last NodeJoin that the scheduler has not answered
        self._now_ns = van.clock.now_ns
        self._resent_ns = self._now_ns()
        self._pause_s = min(TICK_S, resend_s or TICK_S)
        self._tick_ns = 0  # time of the next `tick`
        # servers may still hold requests of an earlier life of this node: numbers must differ
        self.new_id = itertools.count((van.incarnation % (1 << 30) << 32) + 1).__next__
        self.lock = Guard()
        self._is_receiving = False

    def register(
        self,
        handlers: dict[type[Message], Handler],
        *,
        on_directory: Callable[[Directory], None] | None = None,
        on_lost: Callable[[str], None] | None = None,
        on_linked: Callable[[str], None] | None = None,
        on_resend: Callable[[], None] | None = None,
        on_tick: Callable[[], None] | None = None,
        waiting: Callable[[], list[str]] | None = None,
        memory: Memory | None = None,
    ) -> None:
        """Register the handlers of one component of the node.

        Args:
            handlers: Handler of each message type.
            on_directory: Called with each new directory.
            on_lost: Called with the name of a lost node.
            on_linked: Called with the name of a node that was connected again.
            on_resend: Called every `resend_s` seconds, on links that lose messages.
            on_tick: Called about four times a second while the node receives.
            waiting: Returns lines that describe pending waits, for timeout errors of other nodes.
            memory: Returns the memory for an answer, from the request's number, parts and sizes.
        """
        self._handlers |= handlers
        self._on_directory += [] if on_directory is None else [on_directory]
        self._on_lost += [] if on_lost is None else [on_lost]
        self._on_linked += [] if on_linked is None else [on_linked]
        self._on_resend += [] if on_resend is None else [on_resend]
        self._on_tick += [] if on_tick is None else [on_tick]
        self._waiting += [] if waiting is None else [waiting]
        self._memory += [] if memory is None else [memory]

    def receive_into(self, kind: type[ValuesAnswer]) -> None:
        """Receive answers of the type `kind` into the memory that components provide."""

        def allocate(sender: str, message: Message, sizes: tuple[int, ...]) -> Views | None:
            """Return the memory for an answer; runs in the van's thread, without the lock."""
            del sender
            assert isinstance(message, ValuesAnswer), "only values are received into given memory"
            for memory in self._memory:
                views = memory(message.request, message.parts, sizes)
                if views is not None:
                    return views
            return None

        self.van.receive_into(kind, allocate)

    def begin(self, timeout_s: float | None = None) -> None:
        """Connect to the scheduler and announce this node, unless the run is known to have failed.

        Raises:
            RendezvousError: The scheduler cannot be reached.
        """
        self.poll()
        if not self.failure:
            self.links.open(SCHEDULER, self.scheduler, timeout_s)
            self.announce()

    def join(self, timeout_s: float | None = None) -> None:
        """Join the run, and wait for the first directory.

        Raises:
            RendezvousError: The scheduler cannot be reached.
            CommTimeout: Some servers or workers have not joined.
        """
        self.begin(JOIN_S if timeout_s is None else min(timeout_s, JOIN_S))
        try:
            self.wait_until(
                lambda: self.directory or self.failure or not self.links.works(SCHEDULER),
                timeout_s,
                lambda: "not all servers and workers have joined the scheduler",
                lambda: self.waits.ask(NodeJoin(""), [SCHEDULER], 0),
            )
        except CommTimeout as exc:
            raise explained(self, exc, [SCHEDULER]) from None
        if self.directory is None and not self.failure:
            self.failure = "lost the scheduler before all had joined: look for its first error"

    def join_unless(self, is_over: Callable[[], bool]) -> bool:
        """Join unless `is_over()`; return False if the run was over before this node had joined."""
        if self.directory is None and not is_over():
            try:
                self.join()
            except RendezvousError:
                if not is_over():
                    raise
        return self.directory is not None or not is_over()

    def ensure_joined(self, timeout_s: float | None = None) -> None:
        """Join the run unless this node has joined; see `join`, and `raise_failure` for errors."""
        if self.directory is None:
            self.join(timeout_s)
            self.raise_failure()

    def announce(self) -> None:
        """Announce this node to the scheduler, which answers with the directory of all nodes."""
        number = self.van.new_id()
        self.expected.pop(self._announced, None)
        self.expected[number] = self._welcomed
        self._announced = number
        join = NodeJoin(self.van.address, self._start, self.tables, self.epoch)
        self.send(SCHEDULER, join, message_id=number)

    def raise_failure(self) -> None:
        """Raise the error of the run if it has failed, or has removed this node.

        Raises:
            PeerLostError: The run has failed.
            StaleError: The run continues without this node, which was removed.
        """
        if self.is_removed:
            raise StaleError(self.failure)
        if self.failure:
            raise PeerLostError(self.failure)

    def leave(self, reason: str = "") -> None:
        """Report to the scheduler that this node leaves; `reason` is its error, if any."""
        with contextlib.suppress(BraidError):
            self.van.send(SCHEDULER, Leave(reason))

    def close(self, linger_s: float = 1.0) -> None:
        """Close the van. Idempotent."""
        self.van.close(linger_s)

    # -- sending

    def send(
        self,
        to: str,
        message: Message,
        buffers: Sequence[Buffer] = (),
        *,
        answers: int = 0,
        message_id: int = 0,
        priority: int = 0,
    ) -> bool:
        """Send a message, which may answer message `answers`; connect first if necessary.

        Returns:
            Whether the node could be reached. It may be lost before the message arrives.
        """
        send = partial(
            self.van.send,
            to,
            message,
            buffers=buffers,
            answers=answers,
            message_id=message_id,
            priority=priority,
        )
        try:
            try:
                send()
            except PeerLostError:  # nearly always there is a link
                if not self.links.connect(to):
                    return False
                send()
        except (PeerLostError, StaleError):
            self.links.note_broken(to)
            return False
        return True

    def _address_of(self, node: str) -> str | None:
        if node == SCHEDULER:
            return self.scheduler or None  # empty at the scheduler itself
        return None if self.directory is None else self.directory.address_of(node)

    # -- receiving

    def wait_until(
        self,
        is_over: Callable[[], object],
        timeout_s: float | None = None,
        missing: Callable[[], str] = lambda: "",
        span: Callable[[], Span | None] = lambda: None,
    ) -> None:
        """Receive and handle messages until `is_over()`.

        Args:
            is_over: Condition; checked after each message.
            timeout_s: Deadline; 300 s when None, none when infinite.
            missing: Function that describes what is missing, for the error.
            span: Function that records the wait for reports of hangs, unless it is over soon.

        Raises:
            CommTimeout: `is_over` is not true by the deadline.
            StaleError: The van is closed.
        """
        seconds = 300.0 if timeout_s is None else timeout_s
        begin_ns = self._now_ns()
        deadline_ns = begin_ns + seconds * 1e9
        if not self._handle_until(is_over, min(deadline_ns, begin_ns + SHORT_NS)):
            with span() or contextlib.nullcontext():
                if not self._handle_until(is_over, deadline_ns):
                    msg = f"{self.node} timed out after {seconds:g} s: {missing()}"
                    raise CommTimeout(msg)

    def _handle_until(self, is_over: Callable[[], object], deadline_ns: float) -> bool:
        """Receive and handle messages until `is_over()`; return False at the deadline."""
        while True:
            with self.lock.lock:
                now_ns = self._now_ns()
                if now_ns >= self._tick_ns:
                    self.tick(now_ns)
                if is_over():
                    return True
                left_s = (deadline_ns - now_ns) / 1e9
                if left_s <= 0:
                    return False
                if self._is_receiving:
                    self.lock.wait(min(left_s, threading.TIMEOUT_MAX))
                else:
                    self._receive(min(left_s, self._pause_s))
            if self._soon:
                self._run_callbacks()

    def poll(self, delivery: Delivery | None = None) -> None:
        """Handle `delivery` and all messages that have arrived, without waiting for more."""
        with self.lock:
            if delivery is not None:
                self.handle(delivery)
            while not self._is_receiving and (delivery := self.van.try_recv()) is not None:
                self.handle(delivery)
            self.tick(self._now_ns())
        self._run_callbacks()

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call a function of the program after the current messages are handled; it may block."""
        self._soon.append(call)

    def _run_callbacks(self) -> None:
        while True:
            try:
                call = self._soon.popleft()
            except IndexError:  # another thread may have run the last
                return
            call()
            with self.lock:
                self.lock.notify_all()

    def _receive(self, timeout_s: float) -> None:
        """Receive one message and handle it; the lock is released while receiving."""
        self._is_receiving = True
        self.lock.release()
        try:
            delivery = self.van.recv(timeout_s)
        except CommTimeout:
            delivery = None
        finally:
            self.lock.acquire()
            self._is_receiving = False
            if self.lock.num_waiting:
                self.lock.notify_all()
        if delivery is not None:
            self.handle(delivery)

    def handle(self, delivery: Delivery) -> None:
        """Handle a message that has arrived; drop an answer that is not expected."""
        if isinstance(delivery.message, PeerLost) and not self.van.is_connected(delivery.sender):
            self._lose(delivery.sender, delivery.message)
        if delivery.answers:
            handler = self.expected.get(delivery.answers)
        else:
            handler = self._handlers.get(type(delivery.message))
        if handler is not None:
            handler(delivery)

    def tick(self, now_ns: int) -> None:
        """Reconnect broken links that are due, and resend unanswered messages every `resend_s`."""
        self._tick_ns = now_ns + round(self._pause_s * 1e9)
        for call in self._on_tick:
            call()
        for node in self.links.restore(now_ns) if self.links.broken else ():
            if node == SCHEDULER:
                self.announce()
            for on_linked in self._on_linked:
                on_linked(node)
        if self.resend_s is not None and now_ns - self._resent_ns >= self.resend_s * 1e9:
            self._resent_ns = now_ns
            if self._announced:
                self.announce()
            for call in self._on_resend:
                call()

    # -- messages for the whole node

    def _handle_own(self, delivery: Delivery) -> None:
        match delivery.message:
            case Here(directory):
                if directory.epoch > self.epoch and not self._is_of_before(directory):
                    self.waits.note_lives(directory.lives)
                    self.set_directory(directory)
            case Failure(text, is_removed, life):
                if is_removed and life == self.van.incarnation:
                    self.remove(text)
                elif not is_removed:
                    self.failure = self.failure or text
            case StopAt(clock):
                self.stop_at = clock
            case Explain():
                lines = list(dict.fromkeys(line for waiting in self._waiting for line in waiting()))
                self.send(delivery.sender, Explained((), lines), answers=delivery.id)

    def _is_of_before(self, directory: Directory) -> bool:
        """Return whether a first directory does not list this process of a worker yet.

        Servers would refuse the process, and the scheduler would take it for one that it removed.
        A run without tables has no shards, and its directory lists no processes.
        """
        if self.directory is not None or not directory.chains:
            return False
        role, number = split_node(self.node)
        return role == "worker" and directory.lives.get(number) != self.van.incarnation

    def set_directory(self, directory: Directory) -> None:
        """Use a new directory (nodes, and servers of shards), and pass it to all components."""
        self.directory, self.epoch = directory, directory.epoch
        for call in self._on_directory:
            call(directory)

    def publish(self, directory: Directory) -> None:
        """Use a directory, and send it from the scheduler to all connected nodes, servers first."""
        if directory is not self.directory:
            self.set_directory(directory)
        for node in sorted(self.van.peers):
            self.send(node, Here(directory))

    def _welcomed(self, delivery: Delivery) -> None:
        """Handle the scheduler's answer to the announcement of this node."""
        self.expected.pop(self._announced, None)
        self._announced = 0
        if isinstance(delivery.message, Here):
            self._handle_own(delivery)
        elif isinstance(delivery.message, RequestRefused):
            self.failure = self.failure or delivery.message.text

    def remove(self, text: str) -> None:
        """Mark this node as removed from the run: all its waits raise StaleError with `text`."""
        self.is_removed = self.is_removed or not self.failure
        self.failure = self.failure or text

    def _lose(self, node: str, loss: PeerLost) -> None:
        self.links.losses[node] = loss
        if loss.replaced:
            reason = "another process has taken its place"
            self.remove(f"{self.node} was removed from the run, which goes on without it: {reason}")
        self.links.note_broken(node)
        for call in self._on_lost:
            call(node)
