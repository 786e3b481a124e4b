"""One cache line per (rank, channel): counter, what is asked for, where the data lies.

A channel is a sequence of *steps* that all members of a group take in the same order. In each step a rank publishes
one line and waits for the others' lines; nothing else is ever exchanged, and that does flow control, mismatch check
and registration at once:

    word   0         1        2 3 4                    5 6 7
           counter   unused   even step:               odd step:
                              digest  block  site      digest  block  site

`digest` stands for the text of the operation, `block` for the place in the owner's arena where this step's data
lies (staging slot or registered tensor, peers do not care which), `site` for the line of the program that asked.

Why two entries and two staging slots are enough. Let a rank be about to publish step v. It has completed step v-1,
in which it waited for every peer to publish v-1 (`exchange`). A peer publishes v-1 only after it has finished step v-2,
reads included. So nobody still needs what was published in step v-2, which is what step v overwrites. Algorithms that
do not wait for all peers in a step call `settle()` before they write.

Several requests may be under way at once, each on its own channel; order matters inside a channel only. Lines lie in
pages in the owner's arena, which grow by themselves: page k holds 64 * 4^k lines. Line 0 of page 0 is the directory:

    word   0 .. 4                 5                     6       7
           places of pages 0..4   state | channel << 8  value   digest of the reason
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from braid.comm.remote import PRIVATE, PrivateRemote, Remote, SharedRemote
from braid.errors import StaleError
from braid.transport import Block, MemoryTransport, Steps, Wait, WaitAny
from braid.types import text_digest

__all__ = ["ABANDONED", "CLOSED", "DISAGREED", "Channel", "Disagreement", "Entry", "Port", "pieces"]

LINE_WORDS = 8
PAGE_LINES = 64
MAX_PAGES = 5  # 64 + 256 + ... = 21,824 channels a group
MIN_SLOT_BYTES = 4096
MAX_VIEWS = 256  # of staging slots that are kept for the next call of the same size

# directory words
_STATE, _VALUE, _REASON = 5, 6, 7
# low byte of the state word
HEALTHY, DISAGREED, ABANDONED, CLOSED = 0, 1, 2, 3


class Disagreement(Exception):
    """Members asked for different things in one step; carries where, and which members (None: all)."""

    def __init__(self, channel: int, value: int, members: tuple[int, ...] | None = None) -> None:
        super().__init__(channel, value, members)
        self.channel = channel
        self.value = value
        self.members = members


class Entry(NamedTuple):
    """What a member published in one step; all zero when it has published nothing yet."""

    value: int
    digest: int
    block: int
    site: int


class State(NamedTuple):
    """Whether a member still takes part, and if not, why."""

    code: int
    channel: int
    value: int
    reason: int


class Port:
    """A group's window on the transport: the pages of control lines of all members.

    Channel 0 carries the group's collectives; then come n channels for sending, n for acknowledging, and one for each
    persistent request.

    Args:
        transport: Transport of this rank.
        ranks: Global ranks of the members.
        group_rank: This rank's index among them.
        pages: Place of each member's page 0, own included, as its arena's words.
        retired: Closed ports of this rank whose memory a member may still read; shared by its groups.
    """

    channel_type: type[Channel]  # set below that class; the explorer records with its own

    def __init__(
        self,
        transport: MemoryTransport,
        ranks: tuple[int, ...],
        group_rank: int,
        pages: list[int],
        *,
        retired: list[Port] | None = None,
    ) -> None:
        self.transport = transport
        self.retired = [] if retired is None else retired
        self.ranks = ranks
        self.rank = group_rank
        self.size = len(ranks)
        # for traces: equal on all members, another for every group, since no two first pages lie in one place
        self.number = text_digest(f"{ranks} {pages[0]}") & 0xFFFFFFFF
        self.stopped = ""  # why this rank takes no further part
        self.held: list[Steps] = []  # failed operations, whose tensors peers may still write to
        self._pages = pages
        self._channels: dict[int, Channel] = {}
        arena = transport.arena
        self._directories = [
            arena.words(ranks[member], pages[member], LINE_WORDS) for member in range(self.size)
        ]
        self._directories[group_rank][0] = pages[group_rank]
        self._blocks: list[Block] = []
        self._publish_directory()

    @staticmethod
    def first_page(transport: MemoryTransport) -> Block:
        """Reserve and clear page 0 of a new group; its `word` is what the members exchange."""
        return _new_page(transport, 0)

    def channel(self, index: int) -> Channel:
        """The channel with this number; every member gives the same number to the same purpose."""
        channel = self._channels.get(index)
        if channel is None:
            channel = self._channels[index] = self.channel_type(self, index)
        return channel

    def incoming(self) -> Channel:
        """A new view of the lines on which members send to this rank, to count the steps of one of them."""
        return self.channel_type(self, self.sending_index(self.rank))

    def sending_index(self, to: int) -> int:
        """Number of the channel on whose line a member publishes what it sends to member `to`."""
        return 1 + to

    def acknowledging_index(self, source: int) -> int:
        """Number of the channel on whose line a member acknowledges what `source` sent."""
        return 1 + self.size + source

    def request_index(self, number: int) -> int:
        """Number of the channel of the group's n-th persistent request."""
        return 1 + 2 * self.size + number

    def carries_messages(self, index: int) -> bool:
        """Whether a channel is between two members: for sending or acknowledging."""
        return 0 < index <= 2 * self.size

    def own_place(self, index: int) -> int:
        """Place of the own control line of a channel; makes its page if need be."""
        page, line = _place(index)
        directory = self._directories[self.rank]
        if not directory[page]:
            block = _new_page(self.transport, page)
            self._blocks.append(block)
            directory[page] = block.word
            self._publish_directory(block)
        return directory[page] + line  # a line is 64 bytes and so is the unit of the word

    def readers(self, index: int) -> list[int]:
        """Members that look at this rank's line of a channel: one if it is for messages, else all others."""
        if self.carries_messages(index):
            return [member for member in [(index - 1) % self.size] if member != self.rank]
        return [member for member in range(self.size) if member != self.rank]

    def line_of(self, member: int, index: int) -> memoryview | None:
        """Control line of a member; None while it has not made the page."""
        page, line = _place(index)
        word = self._directories[member][page]
        return (
            self.transport.arena.words(self.ranks[member], word + line, LINE_WORDS)
            if word
            else None
        )

    def reached(self, wait: Wait | WaitAny) -> bool:
        """Whether the value that `wait` names, or one of them, has been published."""
        if isinstance(wait, WaitAny):
            return any(self.reached(one) for one in wait.waits)
        return self.channel(wait.channel).counter(wait.peer) >= wait.value

    def state(self, member: int) -> State:
        """Whether a member still takes part."""
        words = self._directories[member]
        code = words[_STATE]
        return State(code & 0xFF, code >> 8, words[_VALUE], words[_REASON])

    def gone(self, member: int) -> bool:
        """Whether nothing more will come from a member: it closed the group, left or was lost."""
        lost = self.transport.health.lost
        return self.state(member).code == CLOSED or self.ranks[member] in lost

    def stop(self, code: int, *, channel: int = 0, value: int = 0, reason: str = "") -> None:
        """Tell the members that this rank takes no further part, and wake them. The first word stands."""
        words = self._directories[self.rank]
        if words[_STATE] or self.transport.forked:  # a forked child has no say for its parent
            return
        self.stopped = reason
        words[_VALUE] = value
        words[_REASON] = self.transport.names.add(reason, last_words=True) if reason else 0
        words[_STATE] = code | channel << 8
        self._publish_directory()

    def text_of(self, member: int, digest: int) -> str:
        """Text behind a digest that a member published."""
        return self.transport.names_of(self.ranks[member]).lookup(digest)

    def close(self) -> None:
        """Tell the members; free staging slots and own pages as soon as none of them can be reading there.

        Page 0 stays: it is where members look whether this one has closed the group.
        """
        self.stop(CLOSED)
        self.retired.append(self)
        for port in tuple(self.retired):
            if port.unread():
                self.retired.remove(port)
                port.reclaim()

    def unread(self) -> bool:
        """Whether every other member has stopped, closed the group or been lost."""
        lost = self.transport.health.lost
        return all(
            rank in lost or self.state(member).code
            for member, rank in enumerate(self.ranks)
            if member != self.rank
        )

    def reclaim(self) -> None:
        """Free staging slots and own pages."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        for block in self._blocks:
            self.transport.arena.free(block)
        self._blocks.clear()
        self.held.clear()

    def _publish_directory(self, page: Block | None = None) -> None:
        """Let all members see the directory, and a new page before it."""
        others = [rank for rank in self.ranks if rank != self.transport.rank]
        word, nbytes = (page.word, page.nbytes) if page is not None else (0, 0)
        audience = self.transport.audience(others)
        # lines of a new page are written long before a slow peer has it: what they say must come after their data
        self.transport.publish(audience, self._pages[self.rank], word, nbytes, changes=True)


class Channel:
    """A sequence of steps on one line per member; see the module for the rules.

    Attributes:
        rank: Group rank of this member.
        size: Number of members.
        ranks: Global ranks of the members.
        others: Group ranks of the others.
        shares: Whether peers may be able to read tensors where they lie, so that offering them makes sense.
        value: Last step that this rank has published.
        digest: Digest of the operation under way; set by the group.
        site: Digest of its call site.
    """

    __slots__ = (
        "_arena",
        "_audience",
        "_lines",
        "_nbytes",
        "_own",
        "_parts",
        "_place",
        "_port",
        "_scratch",
        "_slots",
        "_transport",
        "_views",
        "_word",
        "digest",
        "index",
        "others",
        "rank",
        "ranks",
        "shares",
        "site",
        "size",
        "value",
    )

    def __init__(self, port: Port, index: int) -> None:
        self.index = index
        self.rank = port.rank
        self.size = port.size
        self.others = [r for r in range(port.size) if r != port.rank]
        self.value = 0
        self.digest = 0
        self.site = 0
        self._port = port
        self._transport = port.transport
        self._arena = port.transport.arena
        self.shares = port.transport.shares_memory
        self.ranks = port.ranks
        self._place = port.own_place(index)
        self._own = self._arena.words(port.ranks[port.rank], self._place, LINE_WORDS)
        self._lines: list[memoryview | None] = [None] * port.size
        self._lines[port.rank] = self._own
        self._audience = self._transport.audience([port.ranks[r] for r in port.readers(index)])
        self._slots: list[Block | None] = [None, None]
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._word = 0
        self._nbytes = 0  # of the slot, that the next step fills
        self._parts: list[tuple[int, int]] | None = None  # what each of the others reads of them

    def counter(self, peer: int) -> int:
        """Last step that `peer` has published."""
        line = self._lines[peer] or self._find(peer)
        return line[0] if line is not None else 0

    def entry(self, peer: int, value: int) -> Entry:
        """What `peer` published in step `value`, which must not be older than the step before its last."""
        line = self._lines[peer] or self._find(peer)
        if line is None or line[0] < value:
            return Entry(0, 0, 0, 0)
        at = 2 + 3 * (value & 1)
        return Entry(line[0], line[at], line[at + 1], line[at + 2])

    def room(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Own staging slot of the next step, to be filled before `post`; grows as needed."""
        parity = self.value + 1 & 1
        nbytes = numel * dtype.itemsize
        block = self._slots[parity]
        if block is None or block.nbytes < nbytes:
            if block is not None:
                self._arena.free(block)
            block = self._arena.allocate(max(MIN_SLOT_BYTES, 1 << max(nbytes - 1, 0).bit_length()))
            self._slots[parity] = block
            self._views.clear()
        self._word = block.word
        self._nbytes = nbytes
        view = self._views.get((parity, numel, dtype))
        if view is None:
            if len(self._views) > MAX_VIEWS:
                self._views.clear()
            view = self._arena.view(self.ranks[self.rank], block.word, numel, dtype)
            self._views[parity, numel, dtype] = view
        return view

    def stage(self, x: torch.Tensor) -> None:
        """Copy a flat tensor into the slot of the next step."""
        self.room(x.numel(), x.dtype).copy_(x)

    def divide(self, bounds: Sequence[int], dtype: torch.dtype) -> None:
        """Say that member r will read elements `bounds[r]` to `bounds[r + 1]` of the slot just filled, and no others.

        It saves sending the rest where memory is not shared.
        """
        if not self.shares:
            size = dtype.itemsize
            self._parts = [(bounds[r] * size, bounds[r + 1] * size) for r in self.others]

    def aim(self, member: int, numel: int, dtype: torch.dtype) -> None:
        """Say that only `member` will read the `numel` elements of the slot just filled."""
        if not self.shares:
            self.divide([0] * (member + 1) + [numel] * (self.size - member), dtype)

    def offer(self, x: torch.Tensor, *, private: bool = False) -> None:
        """Let the next step point at the flat tensor `x` itself.

        Args:
            x: Contiguous; stays as it is until a later step has told that everyone has read it.
            private: Whether memory outside the arena is offered, too, by its address; it can be read only.
        """
        self._word = self.place(x, private=private)
        self._nbytes = 0

    def place(self, x: torch.Tensor, *, private: bool = False) -> int:
        """Where peers can read `x`: its word in the arena, else its address if `private`, else 0."""
        word = self._arena.locate(x)
        if not word and private and x.numel():
            word = PRIVATE | x.data_ptr()
        return word

    def post(self) -> int:
        """Publish the next step and return its value."""
        value = self.value + 1
        own = self._own
        at = 2 + 3 * (value & 1)
        own[at] = self.digest
        own[at + 1] = self._word
        own[at + 2] = self.site
        own[0] = self.value = value  # last: whoever sees the counter sees the entry and the data
        self._transport.publish(self._audience, self._place, self._word, self._nbytes, self._parts)
        self._word = self._nbytes = 0
        self._parts = None
        return value

    def exchange(self) -> Steps:
        """Publish the next step, wait for everyone's, compare what was asked for.

        Raises:
            Disagreement: Some member asked for something else.
        """
        value = self.post()
        at = 2 + 3 * (value & 1)
        lines = self._lines
        digest = self.digest
        for peer in self.others:
            line = lines[peer]
            if line is None or line[0] < value:
                yield Wait(peer, self.index, value)
                line = lines[peer]
            if line is None or line[at] != digest:
                raise Disagreement(self.index, value)

    def compare(self, peer: int, value: int) -> None:
        """Check that one peer's step `value` is of the same operation.

        Raises:
            Disagreement: It is not.
        """
        if self.entry(peer, value).digest != self.digest:
            raise Disagreement(self.index, value, (min(peer, self.rank), max(peer, self.rank)))

    def await_step(self, peer: int, value: int) -> Steps:
        """Wait for one peer to publish step `value`, without comparing."""
        if self.counter(peer) < value:
            yield Wait(peer, self.index, value)

    def settle(self) -> Steps:
        """Wait until everyone has published the present step: then both parities may be written."""
        for peer in self.others:
            yield from self.await_step(peer, self.value)

    def peek(self, peer: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """What `peer` published in the present step, as a flat tensor over its memory."""
        line = self._lines[peer]
        if line is None:
            msg = f"step {self.value} of rank {peer} was read before it was published"
            raise StaleError(msg)
        word = line[2 + 3 * (self.value & 1) + 1]
        return self._arena.view(self.ranks[peer], word, numel, dtype)

    def own_words(self, count: int) -> memoryview:
        """First `count` words of the slot that `room` has just given."""
        return self._arena.words(self.ranks[self.rank], self._word, count)

    def words_of(self, peer: int, value: int, count: int) -> memoryview:
        """First `count` words of what `peer` published in step `value`."""
        return self._arena.words(self.ranks[peer], self.entry(peer, value).block, count)

    def text_of(self, member: int, digest: int) -> str:
        """Text behind a digest that a member published."""
        return self._port.text_of(member, digest)

    def offers(self) -> list[int]:
        """Places that the members published in the present step; 0 where there is none."""
        return [self.entry(member, self.value).block for member in range(self.size)]

    def all_registered(self) -> bool:
        """Whether all members offered tensors in shared memory in the present step."""
        return all(word and not word & PRIVATE for word in self.offers())

    def remote(self, peer: int, numel: int, dtype: torch.dtype) -> Remote:
        """What `peer` offered in the present step, a flat tensor of `numel` elements."""
        line = self._lines[peer]
        if line is None:
            msg = f"step {self.value} of rank {peer} was read before it was published"
            raise StaleError(msg)
        return self.remote_at(peer, line[2 + 3 * (self.value & 1) + 1], numel, dtype)

    def remote_at(self, peer: int, word: int, numel: int, dtype: torch.dtype) -> Remote:
        """A flat tensor of `peer` at a place that it has named."""
        rank = self.ranks[peer]
        if word & PRIVATE:
            return PrivateRemote(self._transport, rank, word ^ PRIVATE, dtype)
        return SharedRemote(self._arena.view(rank, word, numel, dtype))

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Private room for intermediate results, the same one at every call."""
        nbytes = numel * dtype.itemsize
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(1 << (nbytes - 1).bit_length(), dtype=torch.uint8)
        return self._scratch[:nbytes].view(dtype)

    def round(self) -> list[int]:
        """The others, each rank beginning with its successor, so that no source is read by all at once."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def close(self) -> None:
        """Free the staging slots."""
        for block in self._slots:
            if block is not None:
                self._arena.free(block)
        self._slots = [None, None]

    def _find(self, peer: int) -> memoryview | None:
        line = self._lines[peer] = self._port.line_of(peer, self.index)
        return line


Port.channel_type = Channel


def _place(index: int) -> tuple[int, int]:
    """Page and line of a channel; line 0 of page 0 is the directory."""
    line = index + 1
    lines = PAGE_LINES
    for page in range(MAX_PAGES):
        if line < lines:
            return page, line
        line -= lines
        lines *= 4
    msg = f"expected at most {index} channels in one group: make a new one with split(0)"
    raise StaleError(msg)


def _new_page(transport: MemoryTransport, page: int) -> Block:
    nbytes = PAGE_LINES * 4**page * LINE_WORDS * 8
    # members learn of page 0 by other ways than through the memory, and may look at once
    block = transport.arena.allocate(nbytes) if page else transport.arena.fresh(nbytes)
    words = transport.arena.words(transport.rank, block.word, block.nbytes // 8)
    words[:] = memoryview(bytes(block.nbytes)).cast("Q")
    return block


def pieces(x: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    """Consecutive slices of a flat tensor of at most `nbytes` each; an empty tensor is one empty piece."""
    numel = x.numel()
    step = max(1, nbytes // x.element_size())
    return [x] if numel <= step else [x[i : i + step] for i in range(0, numel, step)]
