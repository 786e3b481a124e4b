"""A group's window on shared memory: the pages of control lines of all members, and who still takes part.

Lines (see `channel`) lie in pages in the owner's arena, which grow by themselves: page k holds 64 *
4^k lines. Line 0 of page 0 is the directory:

    word   0 .. 4                 5                     6       7
           places of pages 0..4   state | channel << 8  value   digest of the reason
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from braid.comm.channel.channel import LINE_WORDS, Channel
from braid.comm.channel.window_pool import Windows
from braid.errors import StaleError
from braid.transport import Block, MemoryTransport, Wait, WaitAny
from braid.types import text_digest

__all__ = ["ABANDONED", "CLOSED", "DISAGREED", "ControlPages", "State"]

PAGE_LINES = 64
MAX_PAGES = 5  # 64 + 256 + ... = 21,824 channels a group

# directory words
_STATE, _VALUE, _REASON = 5, 6, 7
# low byte of the state word
HEALTHY, DISAGREED, ABANDONED, CLOSED = 0, 1, 2, 3


class State(NamedTuple):
    """Whether a member still takes part, and if not, why."""

    code: int
    channel: int
    value: int
    reason: int


class ControlPages:
    """A group's window on the transport: the pages of control lines of all members.

    Channel 0 carries the group's collectives; then come n channels for sending, n for
    acknowledging, and one for each persistent request.

    Args:
        transport: Transport of this rank.
        ranks: Global ranks of the members.
        group_rank: This rank's index among them.
        pages: Place of each member's page 0, own included, as its arena's words.
        retired: Closed ports of this rank whose memory a member may still read; shared by its
            groups.
    """

    channel_type: type[Channel] = Channel  # the explorer records with its own

    def __init__(
        self,
        transport: MemoryTransport,
        ranks: tuple[int, ...],
        group_rank: int,
        pages: list[int],
        *,
        retired: list[ControlPages] | None = None,
    ) -> None:
        self.transport = transport
        self.retired = [] if retired is None else retired
        self.ranks = ranks
        self.shares = transport.shares_with(ranks)
        self.rank = group_rank
        self.size = len(ranks)
        # for traces: equal on all members, another for every group, since no two first pages lie in
        # one place
        self.number = text_digest(f"{ranks} {pages[0]}") & 0xFFFFFFFF
        self.end_reason = ""  # why this rank takes no further part
        self.abort_reason = ""  # why the program has given the group up, whatever stopped it before
        self.windows = Windows(transport.arena)
        self.pinned: list[
            object
        ] = []  # of failed operations, whose tensors peers may still write to
        self._pages = pages
        self._channels: dict[int, Channel] = {}
        self._making = threading.Lock()  # two threads may be the first on a channel, or on a page
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
            with self._making:
                channel = self._channels.get(index)
                if channel is None:
                    channel = self._channels[index] = self.channel_type(self, index)
        return channel

    def incoming(self) -> Channel:
        """A new view of the lines on which members send to this rank, to count the steps of one of them."""
        with self._making:
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

    def audience(self, index: int) -> list[int]:
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

    def stopped_member(self) -> int | None:
        """One that takes no further part, this rank among them; None where all do, as nearly always."""
        for member, words in enumerate(self._directories):
            if words[_STATE]:
                return member
        return None

    def gone(self, member: int) -> bool:
        """Whether nothing more will come from a member: it closed the group, left or was lost."""
        lost = self.transport.health.lost
        return self.state(member).code == CLOSED or self.ranks[member] in lost

    def stop(self, code: int, *, channel: int = 0, value: int = 0, reason: str = "") -> None:
        """Tell the members that this rank takes no further part, and wake them. The first word stands."""
        words = self._directories[self.rank]
        if words[_STATE] or self.transport.forked:  # a forked child has no say for its parent
            return
        words[_VALUE] = value
        words[_REASON] = self.transport.names.add(reason, last_words=True) if reason else 0
        words[_STATE] = code | channel << 8
        self.end_reason = reason  # after the state, which says what kind of end it is
        self._publish_directory()

    def text_of(self, member: int, digest: int) -> str:
        """Text behind a digest that a member published."""
        return self.transport.names_of(self.ranks[member]).lookup(digest)

    def close(self) -> None:
        """Tell the members; free staging slots and own pages as soon as none of them can be reading there, nor a socket.

        Page 0 stays: it is where members look whether this one has closed the group.
        """
        self.stop(CLOSED)
        self.retired.append(self)
        for port in tuple(self.retired):
            if port.unread() and not port.transport.backlog(port.ranks):
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
        self.windows.close()
        for block in self._blocks:
            self.transport.arena.free(block)
        self._blocks.clear()
        self.pinned.clear()

    def _publish_directory(self, page: Block | None = None) -> None:
        """Let all members see the directory, and a new page before it."""
        others = [rank for rank in self.ranks if rank != self.transport.rank]
        word, nbytes = (page.word, page.nbytes) if page is not None else (0, 0)
        audience = self.transport.audience(others)
        # lines of a new page are written long before a slow peer has it: what they say must come
        # after their data
        self.transport.publish(audience, self._pages[self.rank], word, nbytes, changes=True)


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
