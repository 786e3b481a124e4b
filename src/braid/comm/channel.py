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

Several requests may be under way at once, each on its own channel; order matters inside a channel only. Where the lines
lie is the business of `port`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from braid.comm.remote import PRIVATE, PrivateRemote, Remote, SharedRemote
from braid.errors import StaleError
from braid.transport import Block, Steps, Wait

if TYPE_CHECKING:  # a port makes its channels
    from braid.comm.port import Port
    from braid.comm.windows import Windows

__all__ = ["CHUNK_BYTES", "LINE_WORDS", "Aim", "Channel", "Disagreement", "Entry", "pieces"]

LINE_WORDS = 8
CHUNK_BYTES = (
    512 << 10
)  # of staging: the slots of a few ranks fit into the cache, and steps are few
MIN_SLOT_BYTES = 4096
MAX_VIEWS = 256  # of staging slots that are kept for the next call of the same size


class Disagreement(Exception):
    """Members asked for different things in one step.

    Args:
        channel: Where.
        value: The step.
        members: Which; None for all.
        own: Digests of what this rank asked for, and where; None for the operation that noticed.
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
    """What a member published in one step; all zero when it has published nothing yet."""

    value: int
    digest: int
    block: int
    site: int


class Aim(NamedTuple):
    """Who shall see a step, and what of the own memory with it; see `MemoryTransport.publish`."""

    audience: Any
    word: int = 0
    nbytes: int = 0
    parts: Sequence[tuple[int, int]] | None = None


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
        readers = [port.ranks[r] for r in port.readers(index)]
        self.shares = port.transport.shares_with(readers)
        self.ranks = port.ranks
        self._place = port.own_place(index)
        self._own = self._arena.words(port.ranks[port.rank], self._place, LINE_WORDS)
        self._lines: list[memoryview | None] = [None] * port.size
        self._lines[port.rank] = self._own
        self._audience = self._transport.audience(readers)
        self._slots: list[Block | None] = [None, None]
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
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
        if not self.shares:
            return 0
        word = self._arena.locate(x)
        if not word and private and x.numel():
            word = PRIVATE | x.data_ptr()
        return word

    @property
    def windows(self) -> Windows:
        """Memory that the group lends to operations."""
        return self._port.windows

    def point(self, word: int) -> None:
        """Let the next step name a place of the own arena."""
        self._word = word
        self._nbytes = 0

    def audience(self, members: Sequence[int]) -> Any:
        """Some members, to be aimed at."""
        return self._transport.audience([self.ranks[m] for m in members])

    def view(self, member: int, word: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor at a place of a member's arena."""
        return self._arena.view(self.ranks[member], word, numel, dtype)

    def post(self, aim: Aim | None = None) -> int:
        """Publish the next step and return its value.

        Args:
            aim: Who shall see it; everybody, with what has been staged, when None.
        """
        value = self.value + 1
        own = self._own
        at = 2 + 3 * (value & 1)
        own[at] = self.digest
        own[at + 1] = self._word
        own[at + 2] = self.site
        own[0] = self.value = value  # last: whoever sees the counter sees the entry and the data
        if aim is None:
            aim = Aim(self._audience, self._word, self._nbytes, self._parts)
        self._transport.publish(aim.audience, self._place, aim.word, aim.nbytes, aim.parts)
        self._word = self._nbytes = 0
        self._parts = None
        return value

    def exchange(self, meanwhile: Callable[[], object] | None = None) -> Steps:
        """Publish the next step, wait for everyone's, compare what was asked for.

        Args:
            meanwhile: Called between publishing and waiting, for work that concerns this rank only.

        Raises:
            Disagreement: Some member asked for something else.
        """
        value = self.post()
        if meanwhile is not None:
            meanwhile()
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

    def await_step(self, peer: int, value: int) -> Steps:
        """Wait for one peer to publish step `value`, without comparing."""
        if self.counter(peer) < value:
            yield Wait(peer, self.index, value)

    def has_come(self, peer: int, value: int) -> bool:
        """Whether one peer has published step `value`; if so, its data may be read."""
        return self.counter(peer) >= value

    def settle(self) -> Steps:
        """Wait until everyone has published the present step, and so has read what was published before it."""
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
            self._scratch = torch.empty(
                1 << (nbytes - 1).bit_length(), dtype=torch.uint8, device="cpu"
            )
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


def pieces(x: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    """Consecutive slices of a flat tensor of at most `nbytes` each; an empty tensor is one empty piece."""
    numel = x.numel()
    step = max(1, nbytes // x.element_size())
    return [x] if numel <= step else [x[i : i + step] for i in range(0, numel, step)]
