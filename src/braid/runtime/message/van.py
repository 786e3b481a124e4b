"""Vans: typed messages between named nodes.

Problem: not all communication between processes is a collective. Launcher services, parameter
servers, remote calls and pipelines across hosts send single messages to single peers, of a few
bytes or of gigabytes, and some of them must not wait behind others. Each such system usually has
separate sockets, queues and rules for a lost peer.

Idea: one class, `Van`. A pure state machine (`VanState`) decides; `Van` adds a lock, and blocks
callers that want to wait. A concrete van only defines how frames are transferred and how time
passes: over sockets and pipes for programs, in memory for tests of programs, in a simulated network
with faults and a virtual clock for tests of protocols.

Guarantees
* A message arrives whole or not at all, at most once, and is of a registered type. (A simulated
  network can be configured to duplicate.)
* Messages of one sender and one priority arrive in the order in which they were sent. The most
  urgent message in a sender's queue is sent first. A large message is sent in chunks, between which
  more urgent messages pass.
* A node that does not read slows down only its senders.
* A lost peer is reported: immediately when its process ends, otherwise after `lost_after_s` of
  silence. Its last messages, then the notice of its loss, come before any message of its next life.

Not guaranteed
* Delivery. When a link breaks, the messages on it are lost. The van neither resends nor reconnects:
  it cannot know whether the peer has acted already. Callers send again under the same message id,
  and the receiver drops repetitions; `services` does that.

Source: the Van of PS-Lite (M. Li et al., "Scaling Distributed Machine Learning with the Parameter
Server", OSDI 2014), with additional FIFO among equal priorities, deadlines, types and
authentication.
"""

from __future__ import annotations

import itertools
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from braid.errors import CommTimeout, StaleError
from braid.runtime.clock import Clock
from braid.runtime.closing import Closing
from braid.runtime.message.guard import Guard
from braid.runtime.message.protocol.heads import Open
from braid.runtime.message.protocol.link import Carry, Close
from braid.runtime.message.protocol.schema import Message, Schema
from braid.runtime.message.protocol.send_queue import Outgoing, Sending
from braid.runtime.message.protocol.van_state import VanState
from braid.runtime.message.protocol.vocabulary import Allocate, Delivery, VanStatistics
from braid.runtime.wire import Buffer

__all__ = ["Van"]


class Van(Closing, ABC):
    """Typed messages to and from named nodes. Any thread may send and receive.

    A concrete van implements `connect`, `_carry`, `_cut`, `_read_again` and `_release`, and may
    replace `_wait`. A van is a context manager that closes itself.

    Args:
        state: State machine of the van.
        schema: Messages of the state.
        clock: Clock of all deadlines.
        guard: Lock of the state; notified after every change.

    Attributes:
        clock: Clock of the deadlines.
    """

    def __init__(self, state: VanState, schema: Schema, clock: Clock, guard: Guard) -> None:
        self._state = state
        self._schema = schema
        self.clock = clock
        self._guard = guard
        self._lock = guard.lock
        self._ids = itertools.count(1)
        self._signal: _Signal | None = None
        self._ended = ""  # why the van can no longer send or receive
        self._is_closed = False
        self._is_roused = False

    @property
    def node(self) -> str:
        """Name of this node, such as "worker:3"."""
        return self._state.node

    @property
    def incarnation(self) -> int:
        """Number of this process of the node; a restarted node has a greater number."""
        return self._state.incarnation

    @property
    def epoch(self) -> int:
        """Membership epoch of this node, which every message contains."""
        return self._state.epoch

    @property
    def peers(self) -> tuple[str, ...]:
        """Nodes to which a message can be sent now, sorted."""
        with self._guard:
            return self._state.peers

    def is_connected(self, node: str) -> bool:
        """Return whether a message can be sent to a node now."""
        with self._lock:
            return self._state.is_connected(node)

    @property
    def address(self) -> str:
        """Address that other nodes pass to `connect`; empty if they cannot connect."""
        return ""

    def new_id(self) -> int:
        """Return a new message number, for callers that need it before they send the message."""
        return next(self._ids)

    @abstractmethod
    def connect(self, to: str, address: str = "", *, timeout_s: float | None = None) -> None:
        """Connect to a node; both ends can use the link. Does nothing if there is a link.

        Args:
            to: Name of the node.
            address: Address of the node; vans inside one process need none.
            timeout_s: Deadline; None for the config's default.

        Raises:
            RendezvousError: No node or another node answered, or an end refused the handshake.
        """

    def wait_for(self, peers: Sequence[str], timeout_s: float | None = None) -> None:
        """Wait until all of `peers` are connected.

        Raises:
            CommTimeout: Some peers are not connected by the deadline; the message names them.
        """

        def missing() -> list[str]:
            self._check_open()
            return [peer for peer in peers if peer not in self._state.peers]

        with self._guard:
            if not self._wait_until(lambda: not missing(), self._deadline_ns(timeout_s)):
                connected = ", ".join(self._state.peers) or "no nodes"
                msg = (
                    f"{', '.join(missing())} did not connect to {self.node} before the deadline "
                    f"(connected: {connected}): look for the first error of those processes"
                )
                raise CommTimeout(msg)

    def send(
        self,
        to: str,
        message: Message,
        *,
        buffers: Sequence[Buffer] = (),
        priority: int = 0,
        deadline_s: float | None = None,
        answers: int = 0,
        message_id: int = 0,
    ) -> Sending:
        """Queue a message; wait while the queue of that peer is full.

        Args:
            to: Name of a connected node.
            message: Message, of a type of the schema.
            buffers: Contiguous objects with the buffer protocol; not copied. Do not change them
                until the sending is `done`.
            priority: Urgency, 0 to 15; more is more urgent.
            deadline_s: Seconds after which the message is dropped if it has not been sent, or if
                its last byte has not arrived; None for no deadline. The clock stops while the
                message waits for the peer's `recv`, and while its first chunk is transferred.
            answers: Id of the message that this one answers.
            message_id: Number of the message, from `new_id`, or of the earlier message that this
                one repeats; 0 for a new number.

        Raises:
            CommTimeout: The queue was full until the deadline; the message names the peer that does
                not read.
            PeerLostError: The peer is not connected, or is lost.
            StaleError: The peer is in a later epoch, or the van is closed.
            ConfigError: The message is not of the schema, too large, or a buffer is not contiguous.
        """
        outgoing = self._prepare(message, buffers, priority, deadline_s, answers, message_id)
        with self._lock:
            until_ns = 0
            while not self._submit(to, outgoing):
                until_ns = until_ns or self._deadline_ns(deadline_s)
                if not self._wait(until_ns):
                    raise self._no_room(to)
        return Sending(outgoing, self._wait_sent)

    def try_send(
        self,
        to: str,
        message: Message,
        *,
        buffers: Sequence[Buffer] = (),
        priority: int = 0,
        deadline_s: float | None = None,
        answers: int = 0,
        message_id: int = 0,
    ) -> Sending | None:
        """Queue a message like `send`, but return None instead of waiting."""
        outgoing = self._prepare(message, buffers, priority, deadline_s, answers, message_id)
        with self._lock:
            if not self._submit(to, outgoing):
                return None
        return Sending(outgoing, self._wait_sent)

    def recv(self, timeout_s: float | None = None) -> Delivery:
        """Wait for the next message: the most urgent that has arrived, else the oldest.

        Raises:
            CommTimeout: No message came; the text contains when each peer last sent something.
            StaleError: The van is closed.
        """
        deadline_ns = self._deadline_ns(timeout_s)
        with self._lock:
            while (delivery := self._next_delivery()) is None:
                if self._is_roused:
                    self._is_roused = False
                    msg = f"recv() of {self.node} was ended by another thread, which called rouse()"
                    raise CommTimeout(msg)
                if not self._wait(deadline_ns):
                    now_ns = self.clock.now_ns()
                    last = [self._state.last_received(peer, now_ns) for peer in self._state.peers]
                    msg = (
                        f"no message came for {self.node} before the deadline; "
                        f"{'; '.join(last) or 'no node is connected'}"
                    )
                    raise CommTimeout(msg)
        return delivery

    def try_recv(self) -> Delivery | None:
        """Return the next message if one has arrived; never waits."""
        with self._lock:
            return self._next_delivery()

    def rouse(self) -> None:
        """Make one `recv` raise CommTimeout: a waiting call, or else the next call."""
        with self._lock:
            self._is_roused = True
            self._guard.notify_all()

    def fileno(self) -> int:
        """Return a descriptor that is readable while `try_recv` has a message to return.

        It is for selectors only.
        """
        with self._guard:
            self._check_open()
            if self._signal is None:
                self._signal = _Signal()
                self._signal.show(bool(self._state.inbox.size))
            return self._signal.fileno()

    def receive_into(self, message_type: type[Message], allocate: Allocate | None) -> None:
        """Set the function that chooses the memory for buffers of a message type.

        `allocate(sender, message, sizes)` runs before the buffers arrive, in the van's thread or in
        a thread that waits in the van: keep it short. It returns one writable memoryview for each
        size, or None for new memory. If it raises, the link is closed.
        """
        with self._guard:
            self._state.allocators.pop(message_type, None)
            if allocate is not None:
                self._state.allocators[message_type] = allocate

    def advance_epoch(self, epoch: int) -> None:
        """Begin a later epoch (membership); messages of earlier epochs are dropped and counted.

        This holds for messages that wait on this node and for messages that arrive. Their senders
        are notified, and their next `send` raises StaleError.
        """
        with self._guard:
            self._check_open()
            self._state.advance_epoch(epoch, self.clock.now_ns())
            self._act()

    def statistics(self, peer: str | None = None) -> VanStatistics:
        """Return the counts of one peer, or of all."""
        with self._guard:
            return self._state.statistics(peer)

    def close(self, linger_s: float = 1.0) -> None:
        """End all links, after up to `linger_s` for queued messages to be sent. Idempotent."""
        with self._guard:
            if self._is_closed:
                return
            self._is_closed = True
            self._ended = self._ended or f"the van of {self.node} is closed: open a new one"
            until_ns = self.clock.after_ns(linger_s)
            self._wait_until(lambda: self._state.is_drained, until_ns)
            self._state.send_bye()
            self._act()
            # A peer closes when it has read all earlier data. If this end closed first, a write of
            # the peer would break the connection, and it would not read the rest.
            self._wait_until(lambda: not self._state.peers, until_ns)
            self._state.close()
            self._act()
            if self._signal is not None:
                self._signal.close()
                self._signal = None
        self._release()

    def __repr__(self) -> str:
        if self._ended:
            return f"<{type(self).__name__} {self.node}, closed>"
        count = self.statistics()
        return (
            f"<{type(self).__name__} {self.node}, epoch {self.epoch}, {len(self.peers)} peers, "
            f"{count.queued} queued, {count.unread} unread>"
        )

    # -- transfer of frames and passing of time; all but `_release` with the guard held

    @abstractmethod
    def _carry(self, link: int) -> None:
        """Send the frames of `VanState.next_frame` on a link, as many as it accepts now."""

    @abstractmethod
    def _cut(self, link: int) -> None:
        """Close the connection of a link that the state has removed."""

    @abstractmethod
    def _read_again(self, link: int) -> None:
        """Read from a link that was not read because its peer's share was full."""

    def _wait(self, deadline_ns: int) -> bool:
        """Wait until something may have changed; return False after the deadline."""
        remaining_ns = deadline_ns - self.clock.now_ns()
        if remaining_ns <= 0:
            return False
        self._guard.wait(remaining_ns / 1e9)
        return True

    @abstractmethod
    def _release(self) -> None:
        """Release the van's resources; called once, without the guard."""

    # -- inside, with the guard held

    def _act(self) -> None:
        """Execute the instructions of the last event, and wake the waiting threads."""
        instructions = self._state.instructions
        while instructions:
            instruction = instructions.popleft()
            if isinstance(instruction, Carry):
                self._carry(instruction.link)
            elif isinstance(instruction, Close):
                self._cut(instruction.link)
            else:
                self._read_again(instruction.link)
        if self._signal is not None:
            self._signal.show(bool(self._state.inbox.size))
        if self._guard.num_waiting:
            self._guard.notify_all()

    def _tick_if_due(self, now_ns: int) -> None:
        """Run the state's timers that are due at `now_ns`."""
        due_ns = self._state.next_deadline_ns()
        if due_ns is not None and due_ns <= now_ns:
            self._state.tick(now_ns)
            self._act()

    def _wait_until(self, condition: Callable[[], bool], deadline_ns: int) -> bool:
        """Wait until `condition()` holds; return False if the deadline passes before."""
        while not condition():
            if not self._wait(deadline_ns):
                return False
        return True

    def _prepare(
        self,
        message: Message,
        buffers: Sequence[Buffer],
        priority: int,
        deadline_s: float | None,
        answers: int,
        message_id: int,
    ) -> Outgoing:
        name, body = self._schema.encode(message)
        number = message_id or next(self._ids)
        head = Open(number, name, priority, self._state.epoch, answers, 0, b"", 0, ())
        deadline_ns = None
        if deadline_s is not None:
            deadline_ns = self.clock.after_ns(deadline_s)
        return Outgoing.make(head, body, buffers, deadline_ns)

    def _next_delivery(self) -> Delivery | None:
        """Return the next message for `recv` and `try_recv`; None if there is none."""
        if self._ended:
            raise StaleError(self._ended)
        if not self._state.inbox.size:
            return None
        delivery = self._state.next_delivery(self.clock.now_ns())
        if self._state.instructions or self._signal is not None:
            self._act()
        return delivery

    def _submit(self, to: str, outgoing: Outgoing) -> bool:
        if self._ended:
            raise StaleError(self._ended)
        if not self._state.submit(to, outgoing):
            return False
        self._act()
        return True

    def _wait_sent(self, outgoing: Outgoing, timeout_s: float | None) -> None:
        deadline_ns = outgoing.deadline_ns
        if timeout_s is not None or deadline_ns is None:
            deadline_ns = self._deadline_ns(timeout_s)
        with self._guard:
            if not self._wait_until(lambda: outgoing.finished, deadline_ns):
                self._state.tick(self.clock.now_ns())  # its own deadline may be this one
                self._act()
            if not outgoing.finished:
                progress = (
                    "in progress: its buffers are in use" if outgoing.begun else "in the queue"
                )
                msg = (
                    f"message {outgoing.head.name!r} #{outgoing.head.id} did not leave "
                    f"{self.node} before the deadline: it is still {progress}"
                )
                raise CommTimeout(msg)
        if outgoing.error is not None:
            raise outgoing.error

    def _no_room(self, to: str) -> CommTimeout:
        count = self._state.statistics(to)
        last = self._state.last_received(to, self.clock.now_ns())
        msg = (
            f"the queue of {self.node} to {to} is full: {count.queued} messages of "
            f"{count.queued_bytes} bytes wait, because {to} reads too slowly or not at all; "
            f"{last}"
        )
        return CommTimeout(msg)

    def _deadline_ns(self, timeout_s: float | None) -> int:
        seconds = self._state.config.timeout_s if timeout_s is None else timeout_s
        return self.clock.now_ns() + round(seconds * 1e9)

    def _check_open(self) -> None:
        if self._ended:
            raise StaleError(self._ended)


class _Signal:
    """Descriptor that is readable while it is raised."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._raised = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def show(self, raised: bool) -> None:
        if raised != self._raised:
            self._raised = raised
            if raised:
                self._writer.send(b"!")
            else:
                self._reader.recv(1)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
