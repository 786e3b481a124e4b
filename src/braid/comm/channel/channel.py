"""A channel: one cache line per rank, through which the members of a group take steps together.

A channel is a sequence of *steps* that all members of a group take in the same order. In each step
a rank publishes one line and waits for the lines of the others. Nothing else is ever exchanged;
this does flow control, mismatch check and registration at once:

    word   0         1        2 3 4                    5 6 7
           counter   blocks   even step:               odd step:
                              digest  address  site    digest  address  site

Each word has one writer, the owner of the line. The exception is word 1 of member 0's line, the
work counter, from which members that share memory draw blocks of work (`work_counter`).

`digest` stands for the text of the operation. `address` is the place in the owner's arena where the
data of the step lies, a staging slot or a registered tensor. `site` is the line of the program that
made the call.

Why two entries and two staging slots are enough: let a rank be about to publish step v. It has
completed step v-1, in which it waited for every peer to publish v-1 (`publish_and_wait`). A peer
publishes v-1 only after it has finished step v-2, reads included. So nobody needs what was
published in step v-2 any more, and step v may overwrite it. Algorithms that do not wait for all
peers in a step call `wait_all_read()` before they write.

Several requests may be under way at once, each on its own channel; order matters inside a channel
only. `ControlPages` decides where the lines lie.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from braid.comm.channel.staging import CHUNK_BYTES, Staging
from braid.comm.channel.work_counter import WorkCounter
from braid.errors import StaleError
from braid.runtime.transport import Steps, Wait

if TYPE_CHECKING:  # control pages make their channels
    from braid.comm.channel.control_pages import ControlPages

__all__ = ["LINE_WORDS", "Audience", "Channel", "Disagreement", "Entry"]

LINE_WORDS = 8
WORK_COUNTER = 1  # word of a line
SENT_CHUNK_BYTES = 1 << 20  # where a chunk is sent, an answer costs more than the cache saves


class Disagreement(Exception):
    """Members asked for different things in one step.

    Args:
        channel: Number of the channel.
        value: The step.
        members: Group ranks that disagree; None for all.
        own: Digests of this rank's description and call site; None for those of the operation.
    """

    def __init__(
        self,
        channel: int,
        value: int,
        members: tuple[int, ...] | None = None,
        *,
        own: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(channel, value, members)
        self.channel = channel
        self.value = value
        self.members = members
        self.own = own


class Entry(NamedTuple):
    """The published line of a member for one step; all zero when nothing has been published yet.

    Attributes:
        value: Counter of the member.
        digest: Digest of the operation.
        block: Address of the data in the member's arena.
        site: Digest of the call site.
    """

    value: int
    digest: int
    block: int
    site: int


class Audience(NamedTuple):
    """Peers that are told of a step, and the part of this rank's memory that they read with it.

    See `MemoryTransport.publish` for the fields.
    """

    audience: Any
    address: int = 0
    nbytes: int = 0
    parts: Sequence[tuple[int, int]] | None = None


class Channel:
    """A sequence of steps on one line per member; the module's docstring has the rules.

    Attributes:
        index: Number of the channel in its group.
        rank: Group rank of this member.
        size: Number of members.
        ranks: Global ranks of the members.
        peers: Group ranks of the other members.
        successors: The same, beginning with the successor of this rank, so that ranks which all
            read one after the other do not begin with the same source.
        shares: Whether peers may be able to read tensors in place, so that exposing them makes
            sense.
        chunk_bytes: Size of the pieces in which a large tensor goes through slots.
        value: Last step that this rank has published.
        digest: Digest of the operation under way; set by the operation.
        site: Digest of its call site.
        own: Staging slots of this rank, and what the next step publishes.
        windows: Memory that the group lends to operations.
        transport: This rank's end of the transport.
    """

    __slots__ = (
        "_address",
        "_arena",
        "_audience",
        "_lines",
        "_own_line",
        "_pages",
        "_work_counter",
        "chunk_bytes",
        "digest",
        "index",
        "own",
        "peers",
        "rank",
        "ranks",
        "shares",
        "site",
        "size",
        "successors",
        "transport",
        "value",
        "windows",
    )

    def __init__(self, pages: ControlPages, index: int) -> None:
        self.index = index
        self.rank = pages.rank
        self.size = pages.size
        self.peers = [r for r in range(pages.size) if r != pages.rank]
        self.successors = [
            (pages.rank + distance) % pages.size for distance in range(1, pages.size)
        ]
        self.value = 0
        self.digest = 0
        self.site = 0
        self.ranks = pages.ranks
        self.transport = pages.transport
        self.windows = pages.windows
        readers = [pages.ranks[r] for r in pages.audience(index)]
        self.shares = pages.transport.shares_with(readers)
        self.chunk_bytes = CHUNK_BYTES if self.shares else SENT_CHUNK_BYTES
        self.own = Staging(pages.transport, self.peers, shares=self.shares)
        self._pages = pages
        self._arena = pages.transport.arena
        self._address = pages.own_address(index)
        self._own_line = self._arena.words(pages.ranks[pages.rank], self._address, LINE_WORDS)
        self._lines: list[memoryview | None] = [None] * pages.size
        self._lines[pages.rank] = self._own_line
        self._audience = pages.transport.audience(readers)
        self._work_counter: WorkCounter | None = None

    @property
    def work_counter(self) -> WorkCounter:
        """Counter that shares out blocks of work among members that share memory.

        Use it after the first step that all members have taken.
        """
        if self._work_counter is None:
            line = self._lines[0] or self._find(0)
            assert line is not None, "member 0 has taken a step"
            start = ctypes.addressof(ctypes.c_char.from_buffer(line))
            self._work_counter = WorkCounter(start + WORK_COUNTER * line.itemsize, self.size)
        return self._work_counter

    def line(self, peer: int) -> memoryview | None:
        """Return the control line of `peer`; None while the peer has not made the page."""
        return self._lines[peer] or self._find(peer)

    def counter(self, peer: int) -> int:
        """Return the last step that `peer` has published."""
        line = self._lines[peer] or self._find(peer)
        return line[0] if line is not None else 0

    def entry(self, peer: int, value: int) -> Entry:
        """Return what `peer` published in step `value`.

        The step must not be older than the one before the peer's last.
        """
        line = self._lines[peer] or self._find(peer)
        if line is None or line[0] < value:
            return Entry(0, 0, 0, 0)
        at = 2 + 3 * (value & 1)
        return Entry(line[0], line[at], line[at + 1], line[at + 2])

    def audience(self, members: Sequence[int]) -> Any:
        """Return some members as an audience of `publish`."""
        return self.transport.audience([self.ranks[m] for m in members])

    def view(self, member: int, address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor at an address of a member's arena."""
        return self._arena.view(self.ranks[member], address, numel, dtype)

    def publish(self, audience: Audience | None = None, *, wake: bool = True) -> int:
        """Publish the next step and return its value.

        Args:
            audience: Peers that are told; None for all, with what has been staged.
            wake: Whether to wake and send. Otherwise peers that share memory may see the step,
                but nobody is woken or sent anything before `wake`.
        """
        value = self.value + 1
        line, own = self._own_line, self.own
        parity = value & 1
        at = 2 + 3 * parity
        line[at] = self.digest
        line[at + 1] = own.address
        line[at + 2] = self.site
        line[0] = self.value = value  # last: whoever sees the counter sees the entry and the data
        publish, line_address = self.transport.publish, self._address
        if not wake:
            assert own.nbytes == 0, "what is staged must be sent with its step"
        elif audience is None:
            publish(self._audience, line_address, own.address, own.nbytes, own.parts)
        else:
            publish(
                audience.audience, line_address, audience.address, audience.nbytes, audience.parts
            )
        own.address = own.nbytes = 0
        own.parts = None
        own.parity = 1 - parity
        return value

    def wake(self) -> None:
        """Wake the peers for a step that was published without waking."""
        self.transport.publish(self._audience, self._address)

    def publish_and_wait(
        self, meanwhile: Callable[[], object] | None = None, *, pausing: bool = False
    ) -> Steps:
        """Publish the next step, wait for the step of every peer, and compare descriptions.

        Args:
            meanwhile: Called between publishing and waiting, for work that concerns this rank only.
            pausing: Stop after publishing, whether or not the peers have come, for a caller that
                does not want to go on at once. Nobody is woken before the caller goes on: a woken
                peer takes a core from ranks that compute.

        Raises:
            Disagreement: Some member asked for something else.
        """
        value = self.publish(wake=not pausing)
        if meanwhile is not None:
            meanwhile()
        if pausing:
            yield Wait(self.rank, self.index, value)  # which has come
            self.wake()
        at = 2 + 3 * (value & 1)
        lines = self._lines
        digest = self.digest
        for peer in self.peers:
            line = lines[peer]
            if line is None or line[0] < value:
                yield Wait(peer, self.index, value)
                line = lines[peer]
            if line is None or line[at] != digest:
                raise Disagreement(self.index, value)

    def await_step(self, peer: int, value: int) -> Steps:
        """Wait until one peer has published step `value`, without comparing descriptions."""
        if self.counter(peer) < value:
            yield Wait(peer, self.index, value)

    def has_published(self, peer: int, value: int) -> bool:
        """Return whether one peer has published step `value`; its data may be read then."""
        return self.counter(peer) >= value

    def wait_all_read(self) -> Steps:
        """Wait until every peer has published the present step, and so has read the one before."""
        for peer in self.peers:
            yield from self.await_step(peer, self.value)

    def require_members(self) -> Steps:
        """Block if a member has left the group, until the group's failure is raised.

        Call this before writing into peers' memory: the memory of a rank that left may serve
        another purpose by now. It is meant for operations in which all members wait for this rank's
        next step.
        """
        while (member := self._pages.ended_member()) is not None:
            never = self.value + 2  # nobody takes that step before this rank takes the next
            yield Wait(member, self.index, never)

    def peek(self, peer: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return what `peer` published in the present step, as a flat tensor over its memory."""
        line = self._lines[peer]
        if line is None:
            msg = f"step {self.value} of rank {peer} was read before it was published"
            raise StaleError(msg)
        address = line[2 + 3 * (self.value & 1) + 1]
        return self._arena.view(self.ranks[peer], address, numel, dtype)

    def tensors(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return what each member published in the present step, and `own` for this rank."""
        at, numel, dtype = 3 + 3 * (self.value & 1), own.numel(), own.dtype
        tensors, view, ranks = [], self._arena.view, self.ranks
        for member, line in enumerate(self._lines):
            if member == self.rank:
                tensors.append(own)
            else:
                assert line is not None, "the step has been exchanged"
                tensors.append(view(ranks[member], line[at], numel, dtype))
        return tensors

    def read_words(self, peer: int, value: int, count: int) -> memoryview:
        """Return the first `count` words of what `peer` published in step `value`."""
        return self._arena.words(self.ranks[peer], self.entry(peer, value).block, count)

    def close(self) -> None:
        """Free the staging slots."""
        self.own.free()

    def _find(self, peer: int) -> memoryview | None:
        line = self._lines[peer] = self._pages.line_of(peer, self.index)
        return line
