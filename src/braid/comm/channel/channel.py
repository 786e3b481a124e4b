"""A channel: one cache line per rank, through which the members of a group take steps together.

A channel is a sequence of *steps* that all members of a group take in the same order. In each step
a rank publishes one line and waits for the lines of the other ranks. This one exchange implements
flow control, the mismatch check and registration:

    word   0         1        2 3 4                    5 6 7
           counter   blocks   even step:               odd step:
                              digest  address  site    digest  address  site

Each word has one writer, the owner of the line. The exception is word 1 of member 0's line, the
work counter, from which members that share memory draw blocks of work (`work_counter`).

`digest` identifies the text of the operation's description. `address` is the position of the step's
data in the owner's arena, in a staging slot or a registered tensor. `site` identifies the source
line of the call.

Why two entries and two staging slots are enough: suppose a rank is about to publish step v. It has
completed step v-1, in which it waited for every peer to publish v-1 (`publish_and_wait`). A peer
publishes v-1 only after it has finished step v-2, reads included. So no rank still reads the data
of step v-2, and step v may overwrite it. Algorithms that do not wait for all peers in a step call
`wait_all_read()` before they write.

Several requests may be in progress, each on a separate channel; order matters only inside a
channel. `ControlPages` determines the addresses of the lines.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
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
MAX_WORDS = 256  # views of slots; members replace their slots when messages grow
SENT_CHUNK_BYTES = 1 << 20  # when a chunk is sent, a round trip costs more than the cache saves


class Disagreement(Exception):
    """Members called different operations in one step.

    Args:
        channel: Number of the channel.
        value: Number of the step.
        members: Group ranks that disagree; None for all.
        digests: Digests of this rank's description and call site; None for the digests of the
            operation in progress.
    """

    def __init__(
        self,
        channel: int,
        value: int,
        members: tuple[int, ...] | None = None,
        *,
        digests: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(channel, value, members)
        self.channel = channel
        self.value = value
        self.members = members
        self.digests = digests


class Entry(msgspec.Struct, frozen=True):
    """Values that a member published for one step; all zero if it has not published the step.

    Attributes:
        value: Number of the last step that the member has published.
        digest: Digest of the operation.
        block: Address of the data in the member's arena.
        site: Digest of the call site.
    """

    value: int
    digest: int
    block: int
    site: int


class Audience(NamedTuple):
    """Peers to notify of a step, and the part of this rank's memory that they read with it.

    See `MemoryTransport.publish` for the fields.
    """

    audience: Any
    address: int = 0
    nbytes: int = 0
    parts: Sequence[tuple[int, int]] | None = None


class Channel:
    """Sequence of steps; each member publishes its last step in memory that the others read.

    Attributes:
        index: Number of the channel in its group.
        rank: Group rank of this member.
        size: Number of members.
        ranks: Global ranks of the members.
        peers: Group ranks of the other members.
        successors: The same ranks, beginning after this rank, so that ranks that read all peers in
            turn do not begin with the same peer.
        shares: Whether peers may be able to read tensors in place, so that exposing them is useful.
        chunk_bytes: Size of a large tensor's pieces that go through slots.
        value: Last step that this rank has published.
        digest: Digest of the current operation; set by the operation.
        site: Digest of the current operation's call site.
        own: Staging slots of this rank, and the data that the next step publishes.
        windows: Pool of memory for operations.
        transport: This rank's end of the transport.
    """

    __slots__ = (
        "_address",
        "_arena",
        "_audience",
        "_lines",
        "_own_line",
        "_pages",
        "_words",
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
        self._words: dict[tuple[int, int], memoryview] = {}

    @property
    def work_counter(self) -> WorkCounter:
        """Counter that distributes blocks of work among members that share memory.

        Use it after the first step that all members have taken.
        """
        if self._work_counter is None:
            line = self._lines[0] or self._find(0)
            assert line is not None, "member 0 has taken a step"
            start = ctypes.addressof(ctypes.c_char.from_buffer(line))
            self._work_counter = WorkCounter(start + WORK_COUNTER * line.itemsize, self.size)
        return self._work_counter

    def line(self, peer: int) -> memoryview | None:
        """Return the memory with the last steps of `peer`; None if the peer has not made it yet."""
        return self._lines[peer] or self._find(peer)

    def counter(self, peer: int) -> int:
        """Return the last step that `peer` has published."""
        line = self._lines[peer] or self._find(peer)
        return line[0] if line is not None else 0

    def entry(self, peer: int, value: int) -> Entry:
        """Return the values that `peer` published in step `value`.

        The step must be one of the last two steps of the peer; older values are overwritten.
        """
        line = self._lines[peer] or self._find(peer)
        if line is None or line[0] < value:
            return Entry(0, 0, 0, 0)
        at = 2 + 3 * (value & 1)
        return Entry(line[0], line[at], line[at + 1], line[at + 2])

    def audience(self, members: Sequence[int]) -> Any:
        """Convert group ranks to the form in which the transport takes the ranks to notify."""
        return self.transport.audience([self.ranks[m] for m in members])

    def view(self, member: int, address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor at an address in a member's shared memory."""
        return self._arena.view(self.ranks[member], address, numel, dtype)

    def publish(self, audience: Audience | None = None, *, wake: bool = True) -> int:
        """Publish the next step and return its value.

        Args:
            audience: Peers to notify; None for all, with the staged data.
            wake: Whether to wake peers and send data. Without it, peers that share memory may see
                the step, but no peer is woken or sent anything before `wake`.
        """
        value = self.value + 1
        line, staging = self._own_line, self.own
        at = 2 + 3 * (value & 1)
        line[at] = self.digest
        line[at + 1] = staging.address
        line[at + 2] = self.site
        line[0] = self.value = value  # last: a peer that sees it sees the entry and the data
        staging.turn += staging.nbytes > 0
        publish, line_address = self.transport.publish, self._address
        if not wake:
            assert staging.nbytes == 0, "staged data must be sent with its step"
        elif audience is None:
            publish(self._audience, line_address, staging.address, staging.nbytes, staging.parts)
        else:
            publish(
                audience.audience, line_address, audience.address, audience.nbytes, audience.parts
            )
        staging.address = staging.nbytes = 0
        staging.parts = None
        return value

    def wake(self) -> None:
        """Wake the peers for a step that was published with `wake=False`."""
        self.transport.publish(self._audience, self._address)

    def publish_and_wait(
        self, meanwhile: Callable[[], object] | None = None, *, pausing: bool = False
    ) -> Steps:
        """Publish the next step, wait for the step of every peer, and compare descriptions.

        Args:
            meanwhile: Called between publishing and waiting, for local work of this rank.
            pausing: Whether to yield after publishing, even if the peers have published, for a
                caller that does not want to continue immediately. No peer is woken before the
                caller continues: a woken peer takes a core from ranks that compute.

        Raises:
            Disagreement: Some member called another operation.
        """
        value = self.publish(wake=not pausing)
        if meanwhile is not None:
            meanwhile()
        if pausing:
            yield Wait(self.rank, self.index, value)  # already completed
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
        """Return whether a peer has published step `value`, so that its data may be read."""
        return self.counter(peer) >= value

    def wait_all_read(self) -> Steps:
        """Wait until every peer has published the current step, and so has read the previous."""
        for peer in self.peers:
            yield from self.await_step(peer, self.value)

    def require_members(self) -> Steps:
        """Block if a member has left the group, until the group's failure is raised.

        Call this before writing into peers' memory: the memory of a rank that left may be in other
        use. It is only for operations in which all members wait for this rank's next step.
        """
        while (member := self._pages.ended_member()) is not None:
            never = self.value + 2  # no member takes that step before this rank takes the next
            yield Wait(member, self.index, never)

    def peek(self, peer: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat view of the data that `peer` published in the current step."""
        line = self._lines[peer]
        if line is None:
            msg = (
                f"values of step {self.value} were read before rank {peer} published them: wait "
                "for the step first"
            )
            raise StaleError(msg)
        address = line[2 + 3 * (self.value & 1) + 1]
        return self._arena.view(self.ranks[peer], address, numel, dtype)

    def tensors(self, local: torch.Tensor) -> list[torch.Tensor]:
        """Return each member's data of the current step, with `local` for this rank."""
        at, numel, dtype = 3 + 3 * (self.value & 1), local.numel(), local.dtype
        tensors, view, ranks = [], self._arena.view, self.ranks
        for member, line in enumerate(self._lines):
            if member == self.rank:
                tensors.append(local)
            else:
                assert line is not None, "the step has been exchanged"
                tensors.append(view(ranks[member], line[at], numel, dtype))
        return tensors

    def words(self, member: int, block: int) -> memoryview:
        """Return the first eight words at address `block` of a member's memory."""
        words = self._words.get((member, block))
        if words is None:
            if len(self._words) > MAX_WORDS:
                self._words.clear()
            words = self._arena.words(self.ranks[member], block, LINE_WORDS)
            self._words[member, block] = words
        return words

    def close(self) -> None:
        """Free the shared memory (slots) of this channel."""
        self._words.clear()
        self.own.free()

    def _find(self, peer: int) -> memoryview | None:
        line = self._lines[peer] = self._pages.line_of(peer, self.index)
        return line
