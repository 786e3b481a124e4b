"""The face that all vans share: a `VanState` behind a lock.

What differs is how frames travel and how time passes: a van implements `_carry_out` for the
instructions of its state, and inherits or replaces `_wait`.
"""

from __future__ import annotations

import itertools
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from braid.clock import Clock
from braid.errors import CommTimeout, StaleError
from braid.message.protocol.heads import Open
from braid.message.protocol.schema import Message, Schema
from braid.message.protocol.send_queue import OutFrame, Outgoing
from braid.message.protocol.van import Allocate, Delivery, Sending, VanStatistics
from braid.message.protocol.van_state import Instruction, VanState
from braid.wire import Buffer

__all__ = ["StateVan", "hand_over"]


class _QueuedSending:
    """A `Sending` of a `StateVan`."""

    __slots__ = ("_outgoing", "_wait")

    def __init__(self, outgoing: Outgoing, wait: Callable[[Outgoing, float | None], None]) -> None:
        self._outgoing = outgoing
        self._wait = wait

    @property
    def id(self) -> int:
        """Number of the message."""
        return self._outgoing.head.id

    @property
    def life(self) -> int:
        """See `Sending.life`."""
        return self._outgoing.life

    @property
    def done(self) -> bool:
        """Whether its buffers may be reused."""
        return self._outgoing.done

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Sending.wait`."""
        self._wait(self._outgoing, timeout_s)

    def __repr__(self) -> str:
        state = "waiting"
        if self._outgoing.done:
            state = "sent" if self._outgoing.error is None else "failed"
        return f"<Sending {self._outgoing.head.name} #{self.id}: {state}>"


class _Signal:
    """A descriptor that is readable while it is raised."""

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


class StateVan(ABC):
    """A `Van` around a `VanState`.

    Args:
        state: What it decides.
        schema: The same as of `state`.
        clock: For all deadlines.
        guard: Protects the state; notified after every change.
    """

    def __init__(
        self, state: VanState, schema: Schema, clock: Clock, guard: threading.Condition
    ) -> None:
        self._state = state
        self._schema = schema
        self._clock = clock
        self._guard = guard
        self._ids = itertools.count(1)
        self._signal: _Signal | None = None
        self._ended = ""  # why nothing can be sent or received any more
        self._is_closed = False

    @property
    def node(self) -> str:
        """The own name."""
        return self._state.node

    @property
    def incarnation(self) -> int:
        """Number of this life of the node."""
        return self._state.incarnation

    @property
    def epoch(self) -> int:
        """Membership epoch that every message carries."""
        return self._state.epoch

    @property
    def peers(self) -> tuple[str, ...]:
        """Nodes to which a message can be sent now, sorted."""
        with self._guard:
            return self._state.peers

    @property
    def address(self) -> str:
        """What others pass to `connect`; empty if nobody can."""
        return ""

    @property
    def clock(self) -> Clock:
        """The clock of its deadlines."""
        return self._clock

    def new_id(self) -> int:
        """A number for a message that must be known before it is sent."""
        return next(self._ids)

    @abstractmethod
    def connect(self, to: str, address: str = "", *, timeout_s: float | None = None) -> None:
        """See `Van.connect`."""

    def wait_for(self, peers: Sequence[str], timeout_s: float | None = None) -> None:
        """See `Van.wait_for`."""
        deadline_ns = self._deadline_ns(timeout_s)
        with self._guard:
            while missing := [peer for peer in peers if peer not in self._state.peers]:
                self._check_open()
                if not self._wait(deadline_ns):
                    found = ", ".join(self._state.peers) or "nobody"
                    msg = (
                        f"expected {', '.join(missing)} to connect to {self.node} before the "
                        "deadline, found "
                        f"{found}: look for the first error of those processes"
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
        """See `Van.send`."""
        outgoing = self._prepare(message, buffers, priority, deadline_s, answers, message_id)
        until_ns = self._deadline_ns(deadline_s)
        with self._guard:
            while not self._submit(to, outgoing):
                if not self._wait(until_ns):
                    raise self._no_room(to)
        return _QueuedSending(outgoing, self._wait_sent)

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
        """See `Van.try_send`."""
        outgoing = self._prepare(message, buffers, priority, deadline_s, answers, message_id)
        with self._guard:
            if not self._submit(to, outgoing):
                return None
        return _QueuedSending(outgoing, self._wait_sent)

    def recv(self, timeout_s: float | None = None) -> Delivery:
        """See `Van.recv`."""
        deadline_ns = self._deadline_ns(timeout_s)
        with self._guard:
            while (delivery := self.try_recv()) is None:
                if not self._wait(deadline_ns):
                    now_ns = self._clock.now_ns()
                    heard = [self._state.last_heard(peer, now_ns) for peer in self._state.peers]
                    msg = (
                        f"expected a message for {self.node} before the deadline, found none; "
                        f"{'; '.join(heard) or 'nobody is connected'}"
                    )
                    raise CommTimeout(msg)
        return delivery

    def try_recv(self) -> Delivery | None:
        """See `Van.try_recv`."""
        with self._guard:
            self._check_open()
            delivery = self._state.next_delivery(self._clock.now_ns())
            if delivery is not None:
                self._act()
            return delivery

    def fileno(self) -> int:
        """See `Van.fileno`."""
        with self._guard:
            self._check_open()
            if self._signal is None:
                self._signal = _Signal()
                self._signal.show(bool(self._state.inbox))
            return self._signal.fileno()

    def receive_into(self, message_type: type[Message], allocate: Allocate | None) -> None:
        """See `Van.receive_into`."""
        with self._guard:
            self._state.allocators.pop(message_type, None)
            if allocate is not None:
                self._state.allocators[message_type] = allocate

    def advance_epoch(self, epoch: int) -> None:
        """See `Van.advance_epoch`."""
        with self._guard:
            self._check_open()
            self._state.advance_epoch(epoch, self._clock.now_ns())
            self._act()

    def statistics(self, peer: str | None = None) -> VanStatistics:
        """See `Van.statistics`."""
        with self._guard:
            return self._state.statistics(peer)

    def close(self, linger_s: float = 1.0) -> None:
        """See `Van.close`."""
        with self._guard:
            if self._is_closed:
                return
            self._is_closed = True
            self._ended = self._ended or f"the van of {self.node} is closed: open a new one"
            until_ns = self._clock.now_ns() + round(linger_s * 1e9)
            while not self._state.is_drained and self._wait(until_ns):
                pass
            self._state.say_bye()
            self._act()
            # A peer closes when it has read all that came before. If this end closed first, what
            # the peer is writing would break the connection, and it would not read the rest.
            while self._state.peers and self._wait(until_ns):
                pass
            self._state.close()
            self._act()
            if self._signal is not None:
                self._signal.close()
                self._signal = None
        self._shut()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._ended:
            return f"<{type(self).__name__} {self.node}, closed>"
        count = self.statistics()
        return (
            f"<{type(self).__name__} {self.node}, epoch {self.epoch}, {len(self.peers)} peers, "
            f"{count.queued} queued, "
            f"{count.unread} unread>"
        )

    @abstractmethod
    def _carry_out(self, instruction: Instruction) -> None:
        """Do what the state asks for; called with the guard held."""

    def _wait(self, deadline_ns: int) -> bool:
        """Let the world go on until something may have changed; False when the deadline has passed."""
        remaining_ns = deadline_ns - self._clock.now_ns()
        if remaining_ns <= 0:
            return False
        self._guard.wait(remaining_ns / 1e9)
        return True

    @abstractmethod
    def _shut(self) -> None:
        """Give back what the van owns; called once, without the guard."""

    def _act(self) -> None:
        """Carry out what the last event left behind, and tell whoever waits; with the guard held."""
        instructions = self._state.instructions
        while instructions:
            self._carry_out(instructions.popleft())
        if self._signal is not None:
            self._signal.show(bool(self._state.inbox))
        self._guard.notify_all()

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
        number = message_id or self.new_id()
        head = Open(number, name, priority, self.epoch, answers, 0, b"", 0, ())
        deadline_ns = None
        if deadline_s is not None:
            deadline_ns = self._clock.now_ns() + round(deadline_s * 1e9)
        return Outgoing.make(head, body, buffers, deadline_ns)

    def _submit(self, to: str, outgoing: Outgoing) -> bool:
        self._check_open()
        if not self._state.submit(to, outgoing):
            return False
        self._act()
        return True

    def _wait_sent(self, outgoing: Outgoing, timeout_s: float | None) -> None:
        deadline_ns = outgoing.deadline_ns
        if timeout_s is not None or deadline_ns is None:
            deadline_ns = self._deadline_ns(timeout_s)
        with self._guard:
            while not outgoing.done and self._wait(deadline_ns):
                pass
            if not outgoing.done:  # its own deadline may be this one
                self._state.tick(self._clock.now_ns())
                self._act()
            if not outgoing.done:
                how_far = "under way: its buffers are in use" if outgoing.begun else "in the queue"
                msg = (
                    f"expected message {outgoing.head.name!r} #{outgoing.head.id} to leave "
                    f"{self.node} before the "
                    f"deadline, found it still {how_far}"
                )
                raise CommTimeout(msg)
        if outgoing.error is not None:
            raise outgoing.error

    def _no_room(self, to: str) -> CommTimeout:
        count = self._state.statistics(to)
        heard = self._state.last_heard(to, self._clock.now_ns())
        msg = (
            f"expected room in the queue of {self.node} to {to}, found {count.queued} messages of "
            f"{count.queued_bytes} bytes waiting: {to} does not read, or slower than this node "
            f"sends; {heard}"
        )
        return CommTimeout(msg)

    def _deadline_ns(self, timeout_s: float | None) -> int:
        seconds = self._state.config.timeout_s if timeout_s is None else timeout_s
        return self._clock.now_ns() + round(seconds * 1e9)

    def _check_open(self) -> None:
        if self._ended:
            raise StaleError(self._ended)


def hand_over(frame: OutFrame, receiver: VanState, link: int, now_ns: int) -> None:
    """Give a frame to a state in the same process, copying its pieces once, as the kernel would.

    Raises:
        CommError: The receiver refuses it.
    """
    if frame.pieces:
        targets = receiver.allocate(link, frame.meta, tuple(map(len, frame.pieces)), now_ns)
        for target, piece in zip(targets, frame.pieces, strict=True):
            target[:] = piece
    receiver.frame_received(link, frame.meta, now_ns)
