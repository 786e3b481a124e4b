"""The receiver's side of messages: what has been sent to this rank, and which receive it is for.

Problem: messages of one source come on one line, but receives are begun in any order, with any
tags, from named sources and from whoever sends. A receive must not wait for a message that another
receive is for.

Idea: a receive is *posted* when it is begun. A thread that looks at a line, on behalf of any
receive, takes in what has come there until that receive has its message. Each message goes straight
into the memory of the first posted receive that it fits, or is set aside for one that will be
posted. So a line moves on while anybody waits for anything on it, and messages of one source and
tag reach their receives in order.

Source: the posted-receive and unexpected-message queues of every MPI (e.g. MPICH's ADI).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from braid.comm.algorithms.send import ENVELOPE_BYTES, read_envelope
from braid.comm.channel.channel import Disagreement
from braid.comm.channel.control_pages import ControlPages
from braid.comm.channel.peer_tensor import remote_at
from braid.comm.channel.staging import CHUNK_BYTES, pieces
from braid.errors import CommError, MismatchError
from braid.runtime.transport import Steps, Wait, WaitAny

__all__ = ["Mailbox", "Receipt"]


class Receipt:
    """A receive that has been posted.

    Attributes:
        out: Flat bytes that the message is for.
        tag: Tag of the message.
        digest: Digest of the message's description.
        site: Digest of the call site.
        source: Group rank of the sender when it is known, else -1.
    """

    __slots__ = ("digest", "error", "lines", "message", "out", "site", "source", "tag")

    def __init__(self, out: torch.Tensor, tag: int, digest: int, site: int) -> None:
        self.out = out
        self.tag = tag
        self.digest = digest
        self.site = site
        self.source = -1
        self.lines: Sequence[_Line] = ()  # on which it may come
        self.message: _Message | None = None
        self.error: Exception | None = None


class _Message:
    """A message that has begun to come.

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
        """Begin a receive; `steps` ends it.

        Args:
            out: Flat bytes.
            tag: Tag of the message.
            source: Group rank; None for whoever sends first.
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
        """Wait until the message is in the memory of the receive.

        Raises:
            Disagreement: The message is described differently.
            MismatchError: The message came early, and is described differently.
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
        """Forget a receive that has ended; the rest of its message goes elsewhere."""
        with self._lock:
            message = receipt.message
            if message is not None:
                message.missing = [torch.empty_like(part) for part in message.missing]
                return
            for line in receipt.lines:
                line.posted.remove(receipt)
            receipt.lines = ()

    def position(self, source: int | None) -> int:
        """Return the last step that was taken in from `source`, or from any source."""
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
        self.posted: list[Receipt] = []  # receives for which nothing has come, in order
        self._pages = pages
        self._acks = pages.channel(pages.acknowledging_index(source))
        self._early: list[_Message] = []  # messages that nobody wanted when they came, in order
        self._coming: _Message | None = None  # the one whose parts come next
        self._error: Exception | None = None

    def next_wait(self) -> Wait:
        """Return the wait that is over when there is more."""
        return Wait(self.source, self.channel.index, self.channel.value + 1)

    def has_early(self, receipt: Receipt) -> bool:
        """Give `receipt` the oldest message that fits; return whether there is one."""
        for message in self._early:
            if message.tag == receipt.tag:
                self._early.remove(message)
                self._match(receipt, message)
                if message.digest != receipt.digest:
                    receipt.error = MismatchError(self._other_message(receipt, message))
                return True
        return False

    def receive(self, receipt: Receipt) -> None:
        """Take in what has come, until `receipt` has its message or waits for another line.

        Raises:
            Disagreement: A message does not fit the receive that it is for.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        ch = self.channel
        try:
            while self in receipt.lines and ch.has_published(self.source, ch.value + 1):
                self._step(ch.value + 1)
                if receipt.message is not None and not receipt.message.missing:
                    break
        except BaseException as exc:  # nothing more can be taken from this line, whoever asks
            text = f"rank {ch.ranks[ch.rank]} was interrupted in a message ({type(exc).__name__})"
            self._error = exc if isinstance(exc, Exception) else CommError(text)
            raise

    def _step(self, value: int) -> None:
        ch, message = self.channel, self._coming
        if message is None:
            message = self._open(value)
            ch.value = value
        else:
            ch.value = value
            part = message.missing.pop()
            part.copy_(ch.peek(self.source, part.numel(), torch.uint8))
        self._acks.publish()
        self._coming = message if message.missing else None

    def _open(self, value: int) -> _Message:
        """Take the first step of a message, for the receive that it fits."""
        ch, source = self.channel, self.source
        envelope = read_envelope(ch, source, value)
        digest = ch.entry(source, value).digest
        receipt = next((r for r in self.posted if r.tag == envelope.tag), None)
        if receipt is not None and receipt.digest != digest:
            pair = (min(source, ch.rank), max(source, ch.rank))
            raise Disagreement(ch.index, value, pair, own=(receipt.digest, receipt.site))
        data = receipt.out if receipt is not None else _bytes(envelope.nbytes)
        message = _Message(envelope.tag, digest, data)
        if envelope.address:
            remote_at(ch, source, envelope.address, data.numel(), torch.uint8).read(0, data)
        else:
            first = data[:CHUNK_BYTES]
            ch.value = value
            slot = ch.peek(source, ENVELOPE_BYTES + first.numel(), torch.uint8)
            first.copy_(slot[ENVELOPE_BYTES:])
            if data.numel() > CHUNK_BYTES:
                message.missing = pieces(data[CHUNK_BYTES:], CHUNK_BYTES)[::-1]
        if receipt is None:
            self._early.append(message)
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
            "make both ends agree on shape and dtype, or use another tag"
        )


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")  # whatever the program's default
