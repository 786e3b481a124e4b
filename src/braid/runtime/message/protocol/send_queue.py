"""Send queue of one link: the order of frames, and errors of messages that cannot be sent.

Problem: a gigabyte of gradients that is being sent delays the heartbeat behind it, and the peer is
declared dead. An unbounded queue turns a slow peer into a process that runs out of memory.

Idea: there is one lane per priority, and each frame is chosen separately. Control heads are sent
first, then the next chunk of the first message in the most urgent lane with messages. A message
begins when the previous one in its lane has been sent, so lanes are first in, first out. Chunks are
slices of the sender's memory; nothing is copied.

    state of a message     event                         next
    waiting                its turn: next_frame()        in progress (Open, then More per chunk)
    waiting                deadline, later epoch         done, with CommTimeout or StaleError
    in progress            last chunk sent               done
    in progress            deadline                      done once its current chunk is sent:
                                                         CommTimeout, Cancel to the peer
    any                    link lost or half closed      done, with PeerLostError
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec

from braid.errors import BraidError, CommTimeout, ConfigError
from braid.runtime.message.protocol.heads import (
    INLINE_BODY_BYTES,
    MAX_BUFFERS,
    TAIL_BYTES,
    Cancel,
    Head,
    More,
    Open,
    as_bytes,
    pack,
)
from braid.runtime.message.protocol.vocabulary import NUM_PRIORITIES, VanConfig
from braid.runtime.wire import Buffer

__all__ = ["OutFrame", "Outbox", "Outgoing", "Sending"]

_NOTHING = memoryview(b"")


class OutFrame(msgspec.Struct, frozen=True):
    """Frame to pass to the network.

    Attributes:
        meta: Description of the frame.
        pieces: Slices of the sender's memory.
    """

    meta: bytes
    pieces: Sequence[memoryview]


class Outgoing(msgspec.Struct, eq=False):
    """Message to send, and its progress.

    Attributes:
        head: Head of the message; the remaining time and small buffers are added when it is sent.
        nbytes: Size of body and buffers.
        body: Part of the body that is not in a frame yet; empty if the head contains the body.
        buffers: Parts of the buffers that are not in a frame yet.
        deadline_ns: Time after which the message is dropped; None for never.
        life: Number of the peer's process that is to get it; 0 until the message is queued,
            and until the peer's Hello has arrived.
        begun: Whether the message's head has been sent.
        finished: Whether the van has sent or dropped the message.
        error: Reason why the message was dropped; None if it was sent, or still may be.
    """

    head: Open
    nbytes: int
    body: memoryview
    buffers: deque[memoryview]
    deadline_ns: int | None = None
    life: int = 0
    begun: bool = False
    finished: bool = False
    error: BraidError | None = None

    @classmethod
    def make(
        cls, head: Open, body: bytes, buffers: Sequence[Buffer], deadline_ns: int | None
    ) -> Outgoing:
        """Return a message of `body` and `buffers`, which are added to `head`.

        Raises:
            ConfigError: A buffer is not contiguous, there are too many, or the priority is out of
                range.
        """
        if not 0 <= head.priority < NUM_PRIORITIES or len(buffers) > MAX_BUFFERS:
            msg = (
                f"message {head.name!r} has priority {head.priority} and {len(buffers)} "
                f"buffers: use a priority from 0 to {NUM_PRIORITIES - 1} and at most "
                f"{MAX_BUFFERS} buffers"
            )
            raise ConfigError(msg)
        try:
            views = list(map(as_bytes, buffers))
        except TypeError as exc:
            msg = (
                f"a buffer beside message {head.name!r} is not contiguous ({exc}): send a "
                "contiguous copy of it"
            )
            raise ConfigError(msg) from exc
        inline = len(body) <= INLINE_BODY_BYTES
        head.sizes = tuple(map(len, views))
        if inline:
            head.body, rest = body, _NOTHING
        else:
            head.body_bytes, rest = len(body), memoryview(body)
        nbytes = len(body) + sum(head.sizes)
        return cls(head, nbytes, rest, deque(filter(len, views)), deadline_ns)

    def opening(self, now_ns: int, limit: int) -> Open:
        """Return the head to send, with the remaining time, and with buffers up to `limit` bytes.

        The remaining time of a message with a deadline is at least one microsecond.
        """
        head = self.head
        if self.deadline_ns is not None:
            head.remaining_us = max(1, (self.deadline_ns - now_ns) // 1000)
        if self.buffers and not self.body and self.nbytes - len(head.body) <= limit:
            head.tail = b"".join(self.buffers)
            self.buffers.clear()
        return head

    def cut(self, limit: int) -> list[memoryview]:
        """Return the next bytes for a frame, at most `limit`; body and buffers are not mixed."""
        if self.body:
            piece, self.body = self.body[:limit], self.body[limit:]
            return [piece]
        pieces: list[memoryview] = []
        while limit and self.buffers:
            buffer = self.buffers[0]
            piece = buffer[:limit]
            pieces.append(piece)
            limit -= len(piece)
            if len(piece) < len(buffer):
                self.buffers[0] = buffer[len(piece) :]
            else:
                self.buffers.popleft()
        return pieces


class Outbox:
    """Queue of messages for one link.

    Args:
        peer: Name of the peer, for errors.
        config: Sizes.
        counts: Counter of outcomes of messages, under the names of `VanStatistics`.

    Attributes:
        control: Control messages that wait to be sent; they serve as the next heartbeat.
        queued: Number of messages that wait or are in progress.
        queued_bytes: Their size.
    """

    def __init__(self, peer: str, config: VanConfig, counts: Counter[str]) -> None:
        self._peer = peer
        self._config = config
        self._counts = counts
        self.control: deque[bytes] = deque()
        self._lanes: list[deque[Outgoing]] = [deque() for _ in range(NUM_PRIORITIES)]
        self._busy = 0  # bit p is set while lane p has a message
        self._deadlines: list[tuple[int, int, Outgoing]] = []
        self._numbers = itertools.count()
        self._in_network: Outgoing | None = None  # its chunk was returned by next_frame, not sent
        self._has_failed = False
        self.queued = 0
        self.queued_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether no message waits and none is in progress."""
        return not self.queued and not self.control

    def has_room(self, nbytes: int) -> bool:
        """Return whether a message of `nbytes` fits; an empty queue accepts any size."""
        config = self._config
        return not self.queued or (
            self.queued < config.max_queue_messages
            and self.queued_bytes + nbytes <= config.max_queue_bytes
        )

    def put(self, outgoing: Outgoing) -> None:
        """Append a message to the queue of its priority."""
        priority = outgoing.head.priority
        self._lanes[priority].append(outgoing)
        self._busy |= 1 << priority
        self.queued += 1
        self.queued_bytes += outgoing.nbytes
        if outgoing.deadline_ns is not None:
            entry = (outgoing.deadline_ns, next(self._numbers), outgoing)
            heapq.heappush(self._deadlines, entry)

    def send_control(self, head: Head) -> None:
        """Queue a control head (no part of a message) before all messages.

        It is dropped on a link that has failed.
        """
        if not self._has_failed:
            self.control.append(pack(head))

    def next_frame(self, now_ns: int) -> OutFrame | None:
        """Return the frame to send next, None if nothing waits.

        Call `frame_sent` when the frame was sent, before the next call of this method.
        """
        if self._deadlines:
            self.expire(now_ns)
        if self.control:
            return OutFrame(self.control.popleft(), ())
        if not self._busy:
            return None
        outgoing = self._in_network = self._lanes[self._busy.bit_length() - 1][0]
        if outgoing.begun:
            head: Head = More(outgoing.head.priority)
        else:
            outgoing.begun = True
            head = outgoing.opening(now_ns, min(TAIL_BYTES, self._config.chunk_bytes))
        if outgoing.buffers or outgoing.body:
            return OutFrame(pack(head), outgoing.cut(self._config.chunk_bytes))
        return OutFrame(pack(head), ())

    def frame_sent(self, now_ns: int) -> bool:
        """Record that the last frame has left this process's memory; return whether more wait."""
        outgoing, self._in_network = self._in_network, None
        if outgoing is not None:
            if not outgoing.body and not outgoing.buffers:
                self._counts["sent"] += 1
                self._counts["sent_bytes"] += outgoing.nbytes
                self._finish(outgoing, None)
            elif outgoing.deadline_ns is not None and outgoing.deadline_ns <= now_ns:
                self._expire(outgoing)
        return bool(self.queued or self.control)

    def expire(self, now_ns: int) -> None:
        """End the messages with an expired deadline.

        If a chunk of a message is being sent, the message ends after that chunk: until then its
        memory is in use.
        """
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            outgoing = heapq.heappop(self._deadlines)[2]
            if not outgoing.finished and outgoing is not self._in_network:
                self._expire(outgoing)

    def next_deadline_ns(self) -> int | None:
        """Return the time of the next call of `expire`; None if there are no deadlines."""
        while self._deadlines and self._deadlines[0][2].finished:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def fail(self, error: BraidError) -> None:
        """End all messages with an error; nothing more is sent."""
        self._has_failed = True
        self.control.clear()
        self._in_network = None
        self._end(error, "lost", also_begun=True)

    def fail_waiting(self, error: BraidError) -> None:
        """End all messages that have not begun to be sent, with `error`: their epoch is over."""
        self._end(error, "stale", also_begun=False)

    def _end(self, error: BraidError, count: str, *, also_begun: bool) -> None:
        ended = [
            outgoing
            for lane in self._lanes
            for outgoing in lane
            if also_begun or not outgoing.begun
        ]
        for outgoing in ended:
            self._finish(outgoing, error)
        self._counts[count] += len(ended)

    def _expire(self, outgoing: Outgoing) -> None:
        progress = "in progress" if outgoing.begun else "in the queue"
        if outgoing.begun:
            self.send_control(Cancel(outgoing.head.priority))
        msg = (
            f"message {outgoing.head.name!r} #{outgoing.head.id} did not reach {self._peer} "
            f"before its deadline: it is still {progress}. Pass a longer timeout, or check "
            "whether the peer or the network is slow"
        )
        self._counts["expired"] += 1
        self._finish(outgoing, CommTimeout(msg))

    def _finish(self, outgoing: Outgoing, error: BraidError | None) -> None:
        priority = outgoing.head.priority
        lane = self._lanes[priority]
        lane.remove(outgoing)
        if not lane:
            self._busy &= ~(1 << priority)
        self.queued -= 1
        self.queued_bytes -= outgoing.nbytes
        outgoing.finished, outgoing.error = True, error
        outgoing.body = _NOTHING  # the sender may reuse the memory
        outgoing.buffers.clear()


class Sending(msgspec.Struct, frozen=True, eq=False):
    """Handle of a message to send, from `Van.send`."""

    _outgoing: Outgoing
    _wait: Callable[[Outgoing, float | None], None]

    @property
    def id(self) -> int:
        """Number of the message; pass it as `message_id` to send the same message again."""
        return self._outgoing.head.id

    @property
    def life(self) -> int:
        """Number of the peer's process that was to get the message; 0 before the peer's Hello."""
        return self._outgoing.life

    @property
    def done(self) -> bool:
        """Whether the van has sent or dropped the message, so that its buffers may be reused."""
        return self._outgoing.finished

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the van has passed the whole message to the network.

        Its buffers may then be reused.

        Args:
            timeout_s: Seconds to wait; None for the message's deadline, or for the van's
                `timeout_s` if it has none.

        Raises:
            CommTimeout: The deadline passed; `done` is False if the buffers are still in use.
            PeerLostError: The link broke before.
            StaleError: The van began a later epoch before.
        """
        self._wait(self._outgoing, timeout_s)

    def __repr__(self) -> str:
        state = "waiting"
        if self._outgoing.finished:
            state = "sent" if self._outgoing.error is None else "failed"
        return f"<Sending {self._outgoing.head.name} #{self.id}: {state}>"
