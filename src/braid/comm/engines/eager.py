"""Small messages between members that share memory, without an operation.

Problem: copying a message of 1 KiB takes a microsecond. An `Operation`, with its steps, deadline,
span and place among the others of its channel, takes ten times as long on each end.

Idea: all of that serves messages that wait, queue or fail. Most small messages do none of these: a
slot is free, and the message arrives while the receiver spins. `EagerMessages` carries out this
case only. In any other it changes nothing and returns False, and the engine makes an operation,
which has every check and every error. Both use the same lines and slots (see `send`), so each end
decides alone. As with an operation, an exception (such as KeyboardInterrupt) ends the group, since
a message may be half sent or half received.

A program sends the same kinds of messages again and again. The first one of a peer, shape and dtype
is checked and described as a `Collective`; its `MessageForm` is kept, and the next ones need
neither (`repeat`). A started receive always needs an operation, because it may not wait.

Cost: one copy on each end; no system call if the message has arrived.

Source: the eager protocol of MPI implementations; see `send`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from braid.comm.algorithms.receive import Mailbox
from braid.comm.algorithms.send import EAGER_BYTES, MessageForm
from braid.comm.channel.control_pages import ABANDONED, ControlPages
from braid.comm.engines.collective import Collective
from braid.comm.engines.engine import GroupStatistics
from braid.comm.engines.operation import call_back, stop_reason
from braid.comm.engines.progress import Progress
from braid.comm.engines.work import StepsBy, Work
from braid.comm.tensors.arguments import MOST_TAG
from braid.runtime.events import Recorder

__all__ = ["EagerMessages"]

# torch changes bytes of other dtypes, or has no copy for them
COPIED_BYTE_BY_BYTE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)
MAX_FORMS = 4096  # a job with more shapes makes some of them again


class SentMessage(msgspec.Struct):
    """Counterpart of `Operation` for a message that was sent without one.

    Attributes:
        text: Description of the message.
        error: None.
    """

    text: str
    error: BaseException | None = None

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
        self._transport = pages.transport
        self._now_ns = pages.transport.clock.now_ns
        self._possible = pages.shares and pages.size > 1
        self._forms: dict[tuple[Any, ...], MessageForm] = {}

    def repeat(  # noqa: PLR0917 - the arguments of a message
        self,
        call_site: Callable[[], int],
        kind: str,
        x: Any,
        peer: int | None,
        tag: int,
        async_op: bool,
        steps_by: StepsBy | None = None,
    ) -> Any:
        """Send or receive a message like an earlier one.

        Args:
            call_site: Returns the digest of the call site.
            kind: send or recv.
            x: Value that the user passed, of any type.
            peer: Group rank of the other member.
            tag: Tag of the message.
            async_op: Whether the call returns a Work.
            steps_by: Policy of a `Starter`, whose calls always return a Work; otherwise None.

        Returns:
            Result of the call: `x` or a Work. None if nothing was done.
        """
        starts = async_op or steps_by is not None
        if not isinstance(x, torch.Tensor) or type(peer) is not int or type(tag) is not int:
            return None
        form = self._forms.get((kind, peer, x.dtype, x.shape))
        if (
            form is None
            or not x.is_cpu
            or x.layout is not torch.strided
            or not x.is_contiguous()
            or x.requires_grad
            or x.is_inference()
            or x.is_neg()
            or not -MOST_TAG < tag < MOST_TAG
            # callbacks of the thread may not wait
            or (kind == "recv" if starts else self._progress.thread is not None)
            or self._is_hindered()
            or not (self._send if kind == "send" else self._recv)(form, x, tag, call_site())
        ):
            return None
        return self.sent(form.text, x, steps_by) if starts else x

    def sent(self, text: str, x: Any, steps_by: StepsBy | None) -> Work:
        """Return the Work of a message that has been sent; `text` describes the message."""
        if steps_by is StepsBy.CALLER and not self._progress.idle:
            self._progress.advance_started()
        return Work(SentMessage(text), SentMessage.wait, SentMessage.wait, x)

    def disable(self) -> None:
        """Use an operation for every message from now on."""
        self._possible = False
        self._forms.clear()

    def run(self, c: Collective) -> bool:
        """Send or receive a message, if that is possible at once; return whether it was."""
        if (c.copies is not None and c.copies.needed) or self._is_hindered():
            return False
        key, sends = (c.kind, c.peer, c.dtype, c.shape), c.kind == "send"
        form = self._forms.get(key) or self._new(key, c)
        if form is None:
            return False
        flat, shape = c.ins[0], c.shape
        x = flat if shape is None or len(shape) == 1 else flat.view(shape)
        return (self._send if sends else self._recv)(form, x, c.tag, c.site)

    def _new(self, key: tuple[Any, ...], c: Collective) -> MessageForm | None:
        """Return the form of messages like `c`; None if they need an operation."""
        if (
            not self._possible
            or c.peer < 0
            or c.nbytes > EAGER_BYTES
            or c.dtype not in COPIED_BYTE_BY_BYTE
            or c.shape is None
        ):
            return None
        if len(self._forms) >= MAX_FORMS:
            self._forms.clear()
        pages = self._pages
        if c.kind == "send":
            channel = pages.channel(pages.sending_index(c.peer))
            line = self._acks.line(c.peer)
        else:
            channel = self._mailbox.line(c.peer).channel
            line = channel.line(c.peer)
        if line is None:  # the peer has not made it yet
            return None
        form = MessageForm(channel, line, c.peer, c.ins[0], c.shape, text=c.text, digest=c.digest)
        self._forms[key] = form
        return form

    def _send(self, form: MessageForm, x: torch.Tensor, tag: int, site: int) -> bool:
        """Send a message if a slot is free; return whether it was sent."""
        pages, progress, channel = self._pages, self._progress, form.channel
        start_ns = self._now_ns()
        with progress.ordering:
            if not (progress.idle or progress.is_free(channel)) or form.line[0] < channel.value - 1:
                return False
            try:
                channel.digest = form.digest
                channel.site = site
                form.write(x, tag)
                value = channel.publish()
            except BaseException as exc:
                pages.stop(ABANDONED, reason=stop_reason(form.text, exc))
                raise
        self._note(form, start_ns, channel.index, value, site)
        return True

    def _recv(self, form: MessageForm, x: torch.Tensor, tag: int, site: int) -> bool:
        """Receive a message if it arrives soon; return whether it was received."""
        pages = self._pages
        if not self._progress.idle:
            return False
        start_ns = self._now_ns()
        channel, waited_ns = form.channel, 0
        words, value = form.line, channel.value + 1
        try:
            if words[0] < value:
                waited_ns = self._transport.waiter.spin(
                    lambda: words[0] >= value or bool(pages.end_reason)
                )
            if (
                waited_ns < 0
                or pages.end_reason  # another thread has closed the group
                or not self._mailbox.take(form, x, tag)
            ):
                return False
        except BaseException as exc:
            pages.stop(ABANDONED, reason=stop_reason(form.text, exc))
            raise
        self._statistics.waited_ns += waited_ns
        self._note(form, start_ns, channel.index, value, site)
        return True

    def _is_hindered(self) -> bool:
        return (
            bool(self._pages.end_reason)
            or self._events.listener is not None
            or self._transport.forked
            or torch.is_inference_mode_enabled()
        )

    def _note(self, form: MessageForm, start_ns: int, channel: int, value: int, site: int) -> None:
        spent_ns = self._now_ns() - start_ns
        statistics = self._statistics
        statistics.num_operations += 1
        statistics.nbytes += form.nbytes
        statistics.spent_ns += spent_ns
        self._events.complete(
            form.text, start_ns, spent_ns, self._pages.number, channel, value, form.nbytes, site
        )
