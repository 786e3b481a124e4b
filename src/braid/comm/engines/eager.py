"""Small messages between members that share memory, without an operation.

Problem: copying a message of 1 KiB takes a microsecond. An `Operation`, with its steps, deadline,
span and place among the others of its channel, takes ten times as long on each end.

Idea: all of that serves messages that wait, queue or fail. Most small messages do none of these: a
slot is free, and the message arrives while the receiver spins. `EagerMessages` carries out this
case only. In any other it changes nothing and returns False, and the engine makes an operation,
which has every check and every error. Both use the same lines and slots (see `send`), so each end
decides alone. As with an operation, an exception (such as KeyboardInterrupt) ends the group, since
a message may be half sent or half received.

Cost: one copy on each end; no system call if the message has arrived.

Source: the eager protocol of MPI implementations; see `send`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from braid.comm.algorithms.receive import Mailbox
from braid.comm.algorithms.send import EAGER_BYTES, stage
from braid.comm.channel.channel import Channel
from braid.comm.channel.control_pages import ABANDONED, ControlPages
from braid.comm.engines.collective import Collective
from braid.comm.engines.engine import GroupStatistics
from braid.comm.engines.operation import call_back, stop_reason
from braid.comm.engines.progress import Progress
from braid.runtime.events import Recorder

__all__ = ["EagerMessages", "SentMessage"]

# torch changes bytes of other dtypes, or has no copy for them
COPIED_BYTE_BY_BYTE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)


class SentMessage:
    """Counterpart of `Operation` for a message that was sent without one.

    Args:
        text: Description of the message.
    """

    __slots__ = ("text",)
    error: BaseException | None = None

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def done(self) -> bool:
        """Return True: the message has been sent."""
        return True

    def on_done(self, call: Callable[[], None]) -> None:
        """Call `call` immediately: the message has been sent."""
        call_back(call)

    def wait(self, _timeout_s: float | None = None) -> None:
        """Do nothing: the message has been sent."""


class EagerMessages:
    """Messages of one group that need no operation.

    Args:
        pages: Control pages of the group.
        progress: Progress of this rank's operations.
        mailbox: Messages to this rank.
        events: Recorder of the rank.
        statistics: Counters of the group.
    """

    def __init__(
        self,
        pages: ControlPages,
        progress: Progress,
        mailbox: Mailbox,
        events: Recorder,
        statistics: GroupStatistics,
    ) -> None:
        self._pages = pages
        self._progress = progress
        self._mailbox = mailbox
        self._events = events
        self._statistics = statistics
        self._acks = pages.channel(pages.acknowledging_index(pages.rank))
        self._now_ns = pages.transport.clock.now_ns
        self._possible = pages.shares and pages.size > 1
        self._channels: dict[int, Channel] = {}  # on which this rank sends, by receiver

    def send(self, c: Collective) -> bool:
        """Send a message if a slot is free; return whether it was sent."""
        if not self._is_simple(c):
            return False
        start_ns = self._now_ns()
        pages, progress = self._pages, self._progress
        channel = self._channels.get(c.peer)
        if channel is None:
            channel = pages.channel(pages.sending_index(c.peer))
            self._channels[c.peer] = channel
        with progress.ordering:
            if not progress.is_free(channel) or self._acks.counter(c.peer) < channel.value - 1:
                return False
            try:
                channel.digest = c.digest
                channel.site = c.site
                stage(channel, c.ins[0], c.tag, c.nbytes)
                value = channel.publish()
            except BaseException as exc:
                pages.stop(ABANDONED, reason=stop_reason(c.text, exc))
                raise
        self._note(c, start_ns, channel.index, value)
        return True

    def recv(self, c: Collective) -> bool:
        """Receive a message if it arrives soon; return whether it was received."""
        if c.peer < 0 or not (self._progress.idle and self._is_simple(c)):
            return False
        start_ns = self._now_ns()
        line = self._mailbox.line(c.peer)
        words, value = line.channel.line(c.peer), line.channel.value + 1
        if words is None:
            return False
        waited_ns, pages = 0, self._pages
        try:
            if words[0] < value:
                waited_ns = pages.transport.waiter.spin(
                    lambda: words[0] >= value or bool(pages.end_reason)
                )
            if (
                waited_ns < 0
                or pages.end_reason  # another thread has closed the group
                or not self._mailbox.take(line, c.outs[0], c.tag, c.digest)
            ):
                return False
        except BaseException as exc:
            pages.stop(ABANDONED, reason=stop_reason(c.text, exc))
            raise
        self._statistics.waited_ns += waited_ns
        self._note(c, start_ns, line.channel.index, value)
        return True

    def _is_simple(self, c: Collective) -> bool:
        return (
            self._possible
            and c.nbytes <= EAGER_BYTES
            and c.dtype in COPIED_BYTE_BY_BYTE
            and (c.copies is None or not c.copies.needed)
            and not self._pages.end_reason
            and self._events.listener is None
            and not self._pages.transport.forked
            and not torch.is_inference_mode_enabled()
        )

    def _note(self, c: Collective, start_ns: int, channel: int, value: int) -> None:
        spent_ns = self._now_ns() - start_ns
        statistics = self._statistics
        statistics.num_operations += 1
        statistics.nbytes += c.nbytes
        statistics.spent_ns += spent_ns
        self._events.complete(
            c.text,
            start_ns,
            spent_ns,
            group=self._pages.number,
            channel=channel,
            seq=value,
            nbytes=c.nbytes,
            site=c.site,
        )
