"""Receiver's side of messages: matching incoming messages to receives.

Problem: messages of one source arrive on one line, but receives start in any order, with any tag,
from a named source or from any source. A receive must not block on a message for another receive.

Idea: a receive is *posted* when it starts. A thread that polls a line, on behalf of any receive,
takes in every message there until that receive has its own. Each message goes directly into the
memory of the first matching posted receive, or is stored for a later receive. So a line advances
while any thread waits for a message on it, and messages of one source and tag reach their receives
in order.

Source: the posted-receive and unexpected-message queues of every MPI (e.g. MPICH's ADI).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from braid.comm.algorithms.send import MessageForm, first_part, read_envelope
from braid.comm.channel.channel import Disagreement
from braid.comm.channel.control_pages import ControlPages
from braid.comm.channel.peer_tensor import remote_at
from braid.comm.channel.staging import CHUNK_BYTES, pieces
from braid.errors import CommError, MismatchError
from braid.runtime.transport import Steps, Wait, WaitAny

__all__ = ["Mailbox"]


class Receipt:
    """A posted receive: a receive that was started, so that its message may be taken in.

    Attributes:
        out: Flat destination bytes.
        tag: Tag of the message.
        digest: Digest of the message's description.
        site: Digest of the call site.
        source: Group rank of the sender, -1 while it is unknown.
    """

    __slots__ = ("digest", "error", "lines", "message", "out", "site", "source", "tag")

    def __init__(self, out: torch.Tensor, tag: int, digest: int, site: int) -> None:
        self.out = out
        self.tag = tag
        self.digest = digest
        self.site = site
        self.source = -1
        self.lines: Sequence[_Line] = ()  # lines on which the message may arrive
        self.message: _Message | None = None
        self.error: Exception | None = None


class _Message:
    """A message whose first step has arrived.

    Args:
        tag: Tag of the message.
        digest: Digest of its description.
        data: Memory for the bytes of the message.
    """

    __slots__ = ("data", "digest", "missing", "tag")

    def __init__(self, tag: int, digest: int, data: torch.Tensor) -> None:
        self.tag = tag
        self.digest = digest
        self.data = data
        self.missing: list[torch.Tensor] = []


class Mailbox:
    """All messages to this rank in one group. Any thread may use it.

    Args:
        pages: Control pages of the group.
    """

    def __init__(self, pages: ControlPages) -> None:
        self._pages = pages
        self._lock = threading.Lock()
        self._lines: dict[int, _Line] = {}

    def post(
        self, out: torch.Tensor, tag: int, source: int | None, *, digest: int, site: int = 0
    ) -> Receipt:
        """Start a receive; run `steps` to complete it.

        Args:
            out: Flat bytes.
            tag: Tag of the message.
            source: Group rank; None to receive from any source.
            digest: Digest of the message's description.
            site: Digest of the call site.
        """
        others = (r for r in range(self._pages.size) if r != self._pages.rank)
        receipt = Receipt(out, tag, digest, site)
        with self._lock:
            lines = tuple(self._line(s) for s in (others if source is None else (source,)))
            for line in lines:
                if line.has_early(receipt):
                    return receipt
            for line in lines:
                line.posted.append(receipt)
            receipt.lines = lines
        return receipt

    def steps(self, receipt: Receipt) -> Steps:
        """Wait until the message is in the destination memory of `receipt`.

        Raises:
            Disagreement: The message has another description than the receive.
            MismatchError: The message arrived before the receive, with another description.
        """
        while True:
            with self._lock:
                for line in receipt.lines:
                    line.receive(receipt)
                if receipt.error is not None:
                    raise receipt.error
                message = receipt.message
                if message is not None and not message.missing:
                    break
                waits = tuple(line.next_wait() for line in receipt.lines)
            yield waits[0] if len(waits) == 1 else WaitAny(waits)
        if message.data is not receipt.out:
            receipt.out.copy_(message.data)

    def withdraw(self, receipt: Receipt) -> None:
        """Remove a receive that has ended; the rest of its message is discarded."""
        with self._lock:
            message = receipt.message
            if message is not None:
                message.missing = [torch.empty_like(part) for part in message.missing]
                return
            for line in receipt.lines:
                line.posted.remove(receipt)
            receipt.lines = ()

    def line(self, source: int) -> _Line:
        """Return the line, the sequence of messages, on which `source` sends to this rank."""
        line = self._lines.get(source)
        if line is None:
            with self._lock:
                line = self._line(source)
        return line

    def take(self, form: MessageForm, out: torch.Tensor, tag: int) -> bool:
        """Receive a message of one step, which has arrived, without a posted receive.

        Args:
            form: Form of the message.
            out: Destination.
            tag: Tag of the message.

        Returns:
            Whether the message was received; otherwise nothing has changed. Another message may be
            due before it, or its tag, description or size may need a receipt.
        """
        with self._lock:
            line = self._lines[form.peer]
            if line.posted or line.early or line.coming or line.error:
                return False
            ch, words = line.channel, form.line
            value = ch.value + 1
            at = 2 + 3 * (value & 1)
            if words[0] < value or words[at] != form.digest:
                return False
            try:
                if not form.read(words[at + 1], out, tag):
                    return False
                ch.value = value
                line.acks.publish()
            except BaseException as exc:
                line.fail(exc)
                raise
        return True

    def position(self, source: int | None) -> int:
        """Return the number of the last step that this rank has received from rank `source`.

        If `source` is None, return the highest number over all senders.
        """
        with self._lock:
            lines = self._lines.values()
            steps = (line.channel.value for line in lines if source in {None, line.source})
            return max(steps, default=0)

    def _line(self, source: int) -> _Line:
        line = self._lines.get(source)
        if line is None:
            line = self._lines[source] = _Line(source, self._pages)
        return line


class _Line:
    """Messages that one source sends to this rank.

    Args:
        source: Group rank of the sender.
        pages: Control pages of the group.
    """

    def __init__(self, source: int, pages: ControlPages) -> None:
        self.source = source
        self.channel = pages.incoming()
        self.posted: list[Receipt] = []  # receives without a message, in order
        self._pages = pages
        self.acks = pages.channel(pages.acknowledging_index(source))
        self.early: list[_Message] = []  # messages without a receive, in order
        self.coming: _Message | None = None  # partly received message
        self.error: Exception | None = None

    def next_wait(self) -> Wait:
        """Return a wait that completes when the source publishes its next step."""
        return Wait(self.source, self.channel.index, self.channel.value + 1)

    def has_early(self, receipt: Receipt) -> bool:
        """Complete `receipt` with the oldest stored message that has its tag, if there is one.

        Returns whether there was such a message.
        """
        for message in self.early:
            if message.tag == receipt.tag:
                self.early.remove(message)
                self._match(receipt, message)
                if message.digest != receipt.digest:
                    receipt.error = MismatchError(self._other_message(receipt, message))
                return True
        return False

    def receive(self, receipt: Receipt) -> None:
        """Take in published messages, until `receipt` has its message or matched another line.

        Raises:
            Disagreement: A message has another description than its receive.
        """
        if self.error is not None:
            raise self.error.with_traceback(None)
        ch = self.channel
        try:
            while self in receipt.lines and ch.has_published(self.source, ch.value + 1):
                self._step(ch.value + 1)
                if receipt.message is not None and not receipt.message.missing:
                    break
        except BaseException as exc:
            self.fail(exc)
            raise

    def fail(self, exc: BaseException) -> None:
        """Make later receives on this line raise `exc`, too."""
        rank, kind = self.channel.ranks[self.channel.rank], type(exc).__name__
        text = f"rank {rank} was interrupted while receiving a message ({kind})"
        self.error = exc if isinstance(exc, Exception) else CommError(text)

    def _step(self, value: int) -> None:
        ch, message = self.channel, self.coming
        if message is None:
            message = self._open(value)
            ch.value = value
        else:
            ch.value = value
            part = message.missing.pop()
            part.copy_(ch.peek(self.source, part.numel(), torch.uint8))
        self.acks.publish()
        self.coming = message if message.missing else None

    def _open(self, value: int) -> _Message:
        """Take the first step of a message, and match it to a posted receive."""
        ch, source = self.channel, self.source
        entry = ch.entry(source, value)
        envelope, digest = read_envelope(ch, source, entry.block), entry.digest
        receipt = next((r for r in self.posted if r.tag == envelope.tag), None)
        if receipt is not None and receipt.digest != digest:
            pair = (min(source, ch.rank), max(source, ch.rank))
            raise Disagreement(ch.index, value, pair, digests=(receipt.digest, receipt.site))
        data = receipt.out if receipt is not None else _bytes(envelope.nbytes)
        message = _Message(envelope.tag, digest, data)
        if envelope.address:
            remote_at(ch, source, envelope.address, data.numel(), torch.uint8).read(0, data)
        else:
            first = data[:CHUNK_BYTES]
            first.copy_(first_part(ch, source, entry.block, first))
            if data.numel() > CHUNK_BYTES:
                message.missing = pieces(data[CHUNK_BYTES:], CHUNK_BYTES)[::-1]
        if receipt is None:
            self.early.append(message)
        else:
            self._match(receipt, message)
        return message

    def _match(self, receipt: Receipt, message: _Message) -> None:
        for line in receipt.lines:
            line.posted.remove(receipt)
        receipt.lines = (self,)
        receipt.message = message
        receipt.source = self.source

    def _other_message(self, receipt: Receipt, message: _Message) -> str:
        pages, source = self._pages, self.source
        return (
            f"rank {pages.ranks[source]} sent {pages.text_of(source, message.digest)} with tag "
            f"{receipt.tag}, and this rank asked for {pages.text_of(pages.rank, receipt.digest)}: "
            "use the same shape and dtype on both ranks, or another tag"
        )


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")  # overrides the default device
