"""Control pages: the memory of all members' control lines, and the state of each member.

Control lines (see `channel`) are in pages in the arena of their owner. Pages are added as needed:
page k holds 64 * 4^k lines. Line 0 of page 0 is the directory:

    word   0 .. 4                    5                                  6       7
           addresses of pages 0..4   state, channel<<8, generation<<32  value   digest of the reason

Page 0 of a group that all members have closed is reused by a later group with the next generation.
A member of the old group that reads it again detects by the generation that the group is closed.
If peers keep mirrors of the memory, pages are never reused, since old words may arrive late.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from braid.comm.channel.channel import LINE_WORDS, Channel
from braid.comm.channel.window_pool import WindowPool
from braid.errors import StaleError
from braid.runtime.transport import Block, DeviceWait, MemoryTransport, Wait, WaitAny
from braid.types import text_digest

__all__ = ["ABANDONED", "CLOSED", "DISAGREED", "ControlPages", "MemberState"]

PAGE_LINES = 64
NUM_RESTING = 16  # unused first pages to keep before the oldest one is reused
GENERATION_SHIFT = 32
MAX_PAGES = 5  # 64 + 256 + ... = 21,824 channels a group

# directory words
_STATE, _VALUE, _REASON = 5, 6, 7
# low byte of the state word
HEALTHY, DISAGREED, ABANDONED, CLOSED = 0, 1, 2, 3


class MemberState(NamedTuple):
    """Whether a member still takes part, and the reason if it does not.

    Attributes:
        code: `HEALTHY`, `DISAGREED`, `ABANDONED` or `CLOSED`.
        channel: Number of the channel on which members disagreed.
        value: Step of the disagreement; after a loss, the lost global rank plus one.
        reason: Digest of the text of the reason.
    """

    code: int
    channel: int
    value: int
    reason: int


class RetiredPages:
    """Memory of one rank's closed groups.

    Attributes:
        groups: Pages of closed groups that a member may still read.
        first_pages: First pages that no member reads, oldest first.
        dropped: Pages of groups that were garbage-collected before they were closed.
        lock: Lock of the thread that closes pages.
    """

    def __init__(self) -> None:
        self.groups: list[ControlPages] = []
        self.first_pages: deque[Block] = deque()
        self.dropped: deque[ControlPages] = deque()  # filled by `__del__`, which takes no lock
        self.lock = threading.Lock()

    def close_dropped(self) -> None:
        """Close the pages of groups that were garbage-collected."""
        with self.lock:
            dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
        for pages in dropped:
            pages.close()


class ControlPages:
    """Pages with the control lines in which the members of a group publish their steps.

    Channel 0 is for the group's collectives. It is followed by n channels for sending, n for
    acknowledging, and one for each persistent request.

    Args:
        transport: Transport of this rank.
        ranks: Global ranks of the members.
        group_rank: Index of this rank among them.
        pages: Address of each member's page 0, in words of its arena.
        retired: Memory of closed groups of this rank; shared by its groups.

    Attributes:
        end_reason: Reason why this rank has left the group; empty while it takes part.
        abort_reason: Reason why the program aborted the group, even if a failure ended it before.
        pinned: Tensors of failed operations, which peers may still write to.
        numbers: Numbers of the members for messages; see `Health.number`.
        number: Number of the group in traces: equal on all members, different for each group.
    """

    channel_type: type[Channel] = Channel  # the explorer's tests replace it by a subclass

    def __init__(
        self,
        transport: MemoryTransport,
        ranks: tuple[int, ...],
        group_rank: int,
        pages: list[int],
        *,
        retired: RetiredPages | None = None,
    ) -> None:
        self.transport = transport
        self.retired = RetiredPages() if retired is None else retired
        self.ranks = ranks
        self.numbers = tuple(map(transport.health.number, ranks))
        self.shares = transport.shares_with(ranks)
        self.rank = group_rank
        self.size = len(ranks)
        self.end_reason = ""
        self.abort_reason = ""
        self.windows = WindowPool(transport.arena)
        self.pinned: list[object] = []
        self._pages = pages
        self._channels: dict[int, Channel] = {}
        self._making = threading.Lock()  # two threads may be first to use a channel or a page
        arena = transport.arena
        self._directories = [
            arena.words(ranks[member], pages[member], LINE_WORDS) for member in range(self.size)
        ]
        self._healthy = [words[_STATE] & -1 << GENERATION_SHIFT for words in self._directories]
        # for traces: equal on all members and unique per group, since no two first pages of one
        # generation have the same address
        name = f"{ranks} {pages[0]} {self._healthy[0]}"
        self.number = text_digest.__wrapped__(name) & 0xFFFFFFFF  # without caching each name
        self._directories[group_rank][0] = pages[group_rank]
        self._blocks: list[Block] = []
        self._is_reclaimed = False
        # the memory of the group of all ranks is freed with the transport
        self._closes_when_dropped = retired is not None
        self._publish_directory()

    def __del__(self) -> None:
        """Queue the pages of a group that was dropped without `close`.

        This rank closes them when it makes its next group. Operations and requests refer to the
        pages, so none is in progress here. The garbage collector may call this in any thread, at
        any allocation, where a lock may be held: it only appends to a queue.
        """
        if getattr(self, "_closes_when_dropped", False) and not self.transport.closed:
            self.retired.dropped.append(self)

    @staticmethod
    def first_page(transport: MemoryTransport, retired: RetiredPages | None = None) -> Block:
        """Allocate and clear page 0 of a new group; the members exchange its `address`."""
        if retired is not None:
            retired.close_dropped()
        if retired is None or len(retired.first_pages) <= NUM_RESTING:
            return _new_page(transport, 0)
        block = retired.first_pages.popleft()
        words = transport.arena.words(transport.rank, block.address, block.nbytes // 8)
        generation = (words[_STATE] >> GENERATION_SHIFT) + 1 & 0xFFFFFFFF
        words[_STATE] = generation << GENERATION_SHIFT  # first: it invalidates the old group
        words[:_STATE] = memoryview(bytes(8 * _STATE)).cast("Q")
        words[_VALUE:] = memoryview(bytes(8 * (len(words) - _VALUE))).cast("Q")
        return block

    def channel(self, index: int) -> Channel:
        """Return the channel with this number; all members use a number for the same purpose."""
        channel = self._channels.get(index)
        if channel is None:
            with self._making:
                channel = self._channels.get(index)
                if channel is None:
                    channel = self._channels[index] = self.channel_type(self, index)
        return channel

    def incoming(self) -> Channel:
        """Return a new view of the channel on which members send to this rank."""
        with self._making:
            return self.channel_type(self, self.sending_index(self.rank))

    def sending_index(self, to: int) -> int:
        """Return the number of the channel on which members send to member `to`."""
        return 1 + to

    def acknowledging_index(self, source: int) -> int:
        """Return the number of the channel for acknowledging messages of `source`."""
        return 1 + self.size + source

    def request_index(self, number: int) -> int:
        """Return the number of the channel of the group's n-th persistent request."""
        return 1 + 2 * self.size + number

    def carries_messages(self, index: int) -> bool:
        """Return whether channel `index` is for `send` and `recv`, or for acknowledging them."""
        return 0 < index <= 2 * self.size

    def own_address(self, index: int) -> int:
        """Return the address of the line in which this rank publishes its steps on a channel.

        A page of lines is added if needed.
        """
        page, line = _place(index)
        directory = self._directories[self.rank]
        if self._is_reclaimed:
            msg = "the group has been closed by all of its members: make a new group"
            raise StaleError(msg)
        if not directory[page]:
            block = _new_page(self.transport, page)
            self._blocks.append(block)
            directory[page] = block.address
            self._publish_directory(block)
        return directory[page] + line  # a line is 64 bytes and so is the unit of the address

    def audience(self, index: int) -> list[int]:
        """Return the members that read the steps of this rank on a channel."""
        if self.carries_messages(index):
            return [member for member in [(index - 1) % self.size] if member != self.rank]
        return [member for member in range(self.size) if member != self.rank]

    def line_of(self, member: int, index: int) -> memoryview | None:
        """Return the memory in which a member publishes its steps on channel `index`, or None."""
        page, line = _place(index)
        address = self._directories[member][page]
        return (
            self.transport.arena.words(self.ranks[member], address + line, LINE_WORDS)
            if address
            else None
        )

    def reached(self, wait: Wait | WaitAny | DeviceWait) -> bool:
        """Return whether `wait` is complete; for a `WaitAny`, whether one of its waits is."""
        if isinstance(wait, WaitAny):
            return any(self.reached(one) for one in wait.waits)
        if isinstance(wait, DeviceWait):
            return wait.is_completed()
        return self.channel(wait.channel).counter(wait.peer) >= wait.value

    def state(self, member: int) -> MemberState:
        """Return whether a member still takes part, and the reason if it does not."""
        words = self._directories[member]
        code = words[_STATE] - self._healthy[member]
        if not 0 <= code < 1 << GENERATION_SHIFT:  # another group reuses the page
            return MemberState(CLOSED, 0, 0, 0)
        return MemberState(code & 0xFF, code >> 8, words[_VALUE], words[_REASON])

    def ended_member(self) -> int | None:
        """Return a member that has left the group, possibly this rank; None while all take part."""
        for member, words in enumerate(self._directories):
            if words[_STATE] != self._healthy[member]:
                return member
        return None

    def gone(self, member: int) -> bool:
        """Return whether a member has closed the group, left or been lost."""
        lost = self.transport.health.lost
        return self.state(member).code == CLOSED or self.ranks[member] in lost

    def stop(self, code: int, *, channel: int = 0, value: int = 0, reason: str = "") -> None:
        """Publish that this rank has left the group; later calls do not change the reason.

        Args:
            code: Kind of the end, such as `ABANDONED`; see `MemberState`.
            channel: Number of the channel on which members disagreed.
            value: Step of the disagreement; after a loss, the lost global rank plus one.
            reason: Text for errors of other members.
        """
        words = self._directories[self.rank]
        healthy = self._healthy[self.rank]
        if words[_STATE] != healthy or self.transport.forked:  # not the parent's rank
            return
        words[_VALUE] = value
        words[_REASON] = self.transport.names.add(reason, last_words=True) if reason else 0
        words[_STATE] = healthy | code | channel << 8
        # after the state, which tells the kind of end
        self.end_reason = reason or "this rank has closed it"
        self._publish_directory()

    def text_of(self, member: int, digest: int) -> str:
        """Return the text of a digest that a member published."""
        return self.transport.names_of(self.ranks[member]).lookup(digest)

    def close(self) -> None:
        """Publish that this rank closes the group; free memory once no member can read it."""
        self._closes_when_dropped = False
        self.stop(CLOSED)
        with self.retired.lock:
            self.retired.groups.append(self)
            for port in tuple(self.retired.groups):
                if port.unread() and not port.transport.backlog(port.ranks):
                    self.retired.groups.remove(port)
                    port.reclaim()

    def unread(self) -> bool:
        """Return whether every other member has stopped, closed the group or been lost."""
        lost = self.transport.health.lost
        return all(
            rank in lost or self.state(member).code
            for member, rank in enumerate(self.ranks)
            if member != self.rank
        )

    def reclaim(self) -> None:
        """Free the memory of this rank: the slots of all channels, and the control pages."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self.windows.close()
        for block in self._blocks:
            self.transport.arena.free(block)
        self._blocks.clear()
        self.pinned.clear()
        self._reclaim_first_page()

    def _reclaim_first_page(self) -> None:
        """Keep page 0 for another group if every member has closed this one.

        After a failure the page stays, as members may still read the reason there.
        """
        arena, lost = self.transport.arena, self.transport.health.lost
        address = self._pages[self.rank]
        closed = all(
            rank in lost or self.state(member).code == CLOSED
            for member, rank in enumerate(self.ranks)
        )
        if closed and not arena.is_mirrored and not self._is_reclaimed:
            self._is_reclaimed = True
            self.retired.first_pages.append(Block.at(address, PAGE_LINES * LINE_WORDS * 8))

    def _publish_directory(self, page: Block | None = None) -> None:
        """Publish to all members a new page, if there is one, and then the directory."""
        others = [rank for rank in self.ranks if rank != self.transport.rank]
        address, nbytes = (page.address, page.nbytes) if page is not None else (0, 0)
        audience = self.transport.audience(others)
        # lines of a new page may be written before a slow peer has it: they must arrive after
        # their data
        self.transport.publish(audience, self._pages[self.rank], address, nbytes, changes=True)


def _place(index: int) -> tuple[int, int]:
    """Return the page and line of a channel; line 0 of page 0 is the directory."""
    line = index + 1
    lines = PAGE_LINES
    for page in range(MAX_PAGES):
        if line < lines:
            return page, line
        line -= lines
        lines *= 4
    msg = f"all {index} channels of this group are in use: make another group with split(0)"
    raise StaleError(msg)


def _new_page(transport: MemoryTransport, page: int) -> Block:
    nbytes = PAGE_LINES * 4**page * LINE_WORDS * 8
    # members get the address of page 0 by other ways than memory, and may read it immediately
    block = transport.arena.allocate(nbytes) if page else transport.arena.fresh(nbytes)
    words = transport.arena.words(transport.rank, block.address, block.nbytes // 8)
    words[:] = memoryview(bytes(block.nbytes)).cast("Q")
    return block
