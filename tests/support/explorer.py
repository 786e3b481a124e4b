"""Explore every interleaving of a collective on two or three ranks.

Problem: a collective over shared memory can be wrong in ways that no amount of running shows: a
slot overwritten while a slow peer still reads it, a wait that is never answered. Tests see the few
interleavings that the machine happens to produce.

Idea: a rank's actions do not depend on timing, only *when* it takes them does. So one run in a
single thread records each rank's actions:

    Publish(channel, value)          the counter is set
    Acquire(peer, channel, value)    blocks until the peer's counter is there
    Access(...)                      memory read and written since the last of the above; seen
                                     by intercepting every torch operation and looking up where
                                     its tensors lie

Then all interleavings of these lists are enumerated. A state is the position of each rank in its
list. There is a *deadlock* if some state has unfinished ranks and none can move. There is a *race*
if in some state two ranks are both about to access the same bytes and one of them writes. Early
reuse of a slot is a race, too. Since counters only grow, the absence of races means that every
interleaving computes what the recorded one did.

The assignment of claimed blocks of work to ranks does depend on timing. There the caller deals the
blocks out, and explores one deal after the other.

Source: the recording is the dynamic part of Flanagan and Godefroid, "Dynamic Partial-Order
Reduction" (2005); with two or three ranks nothing has to be reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from braid.comm.channel.channel import Audience, Channel
from braid.comm.channel.control_pages import ControlPages
from braid.comm.channel.work_counter import WorkCounter
from braid.runtime.torch_internals import TorchDispatchMode
from braid.runtime.transport import Arena, Fabric, MemoryTransport, Steps, Wait, WaitAny

__all__ = ["Access", "Acquire", "Exploration", "Publish", "Span", "explore", "record"]


class Span(NamedTuple):
    """A range of bytes of shared memory: owner, extent, first byte, end."""

    rank: int
    extent: int
    start: int
    end: int

    def overlaps(self, other: Span) -> bool:
        """Whether both spans share a byte."""
        same = self[:2] == other[:2]
        return same and self.start < other.end and other.start < self.end


class Publish(NamedTuple):
    """The action that sets the rank's counter on `channel` to `value`."""

    channel: int
    value: int


class Acquire(NamedTuple):
    """The action that waits until `peer` has published `value` on `channel`."""

    peer: int
    channel: int
    value: int


class Access(NamedTuple):
    """The action that reads and writes shared memory, in one go."""

    reads: frozenset[Span]
    writes: frozenset[Span]

    def conflicts(self, other: Access) -> Span | None:
        """List the bytes that both accesses touch and at least one writes."""
        for mine, theirs in (
            (self.writes, other.writes | other.reads),
            (self.reads, other.writes),
        ):
            for span in mine:
                if any(span.overlaps(o) for o in theirs):
                    return span
        return None


Action = Publish | Acquire | Access


class Exploration(NamedTuple):
    """Result of an exploration.

    Attributes:
        num_states: Number of reachable states.
        deadlocks: Positions of all ranks in states in which no rank can move.
        races: (ranks, span, positions) of simultaneous conflicting accesses.
    """

    num_states: int
    deadlocks: list[tuple[int, ...]]
    races: list[tuple[tuple[int, int], Span, tuple[int, ...]]]


def record(
    size: int,
    make_steps: Callable[[ControlPages], Steps],
    *,
    deal: Callable[[int], int] | None = None,
) -> list[list[Action]]:
    """Run a collective on `size` ranks in this thread and record what each rank does.

    Args:
        size: Number of ranks.
        make_steps: Called once per rank with its channel; several collectives may be chained with
            `yield from`.
        deal: Rank of each block of work that any member may claim; in turns when None.

    Returns:
        The actions of each rank, in its order.

    Raises:
        AssertionError: The ranks wait for each other already in this run.
    """
    with Fabric(size) as fabric:
        pages = [ControlPages.first_page(t).address for t in fabric.transports]
        ranks = tuple(range(size))
        actions: list[list[Action]] = [[] for _ in ranks]
        ports = [
            _RecordingPages(t, ranks, r, pages, actions[r], deal or (lambda block: block % size))
            for r, t in enumerate(fabric.transports)
        ]
        steps = [make_steps(port) for port in ports]
        _run_in_turns(ports, steps, actions)
        for port in ports:
            port.close()
        return actions


def explore(programs: Sequence[Sequence[Action]]) -> Exploration:
    """Enumerate all interleavings of recorded programs; see the module."""
    published = [_counters(program) for program in programs]
    start = (0,) * len(programs)
    seen = {start}
    frontier = [start]
    deadlocks: list[tuple[int, ...]] = []
    races: list[tuple[tuple[int, int], Span, tuple[int, ...]]] = []

    while frontier:
        state = frontier.pop()
        movable = [r for r in range(len(programs)) if _enabled(programs, published, state, r)]
        if not movable and any(at < len(p) for at, p in zip(state, programs, strict=True)):
            deadlocks.append(state)
        races += _races(programs, state, movable)
        for rank in movable:
            successor = (*state[:rank], state[rank] + 1, *state[rank + 1 :])
            if successor not in seen:
                seen.add(successor)
                frontier.append(successor)
    return Exploration(len(seen), deadlocks, races)


def _counters(program: Sequence[Action]) -> list[dict[int, int]]:
    """Compute the counter per channel before each action, and at the end."""
    counters: list[dict[int, int]] = [{}]
    for action in program:
        latest = dict(counters[-1])
        if isinstance(action, Publish):
            latest[action.channel] = action.value
        counters.append(latest)
    return counters


def _enabled(
    programs: Sequence[Sequence[Action]],
    published: Sequence[Sequence[dict[int, int]]],
    state: tuple[int, ...],
    rank: int,
) -> bool:
    if state[rank] == len(programs[rank]):
        return False
    action = programs[rank][state[rank]]
    if isinstance(action, Acquire):
        return published[action.peer][state[action.peer]].get(action.channel, 0) >= action.value
    return True


def _races(
    programs: Sequence[Sequence[Action]], state: tuple[int, ...], movable: list[int]
) -> list[tuple[tuple[int, int], Span, tuple[int, ...]]]:
    accesses = [(r, programs[r][state[r]]) for r in movable]
    races = []
    for index, (first, one) in enumerate(accesses):
        for second, other in accesses[index + 1 :]:
            if isinstance(one, Access) and isinstance(other, Access):
                span = one.conflicts(other)
                if span is not None:
                    races.append(((first, second), span, state))
    return races


def _run_in_turns(
    ports: Sequence[_RecordingPages], steps: Sequence[Steps], actions: Sequence[list[Action]]
) -> None:
    """Advance each rank as far as possible, again and again, in one thread."""
    pending: list[Wait | WaitAny | None] = [None] * len(ports)
    running = list(range(len(ports)))
    arenas = [port.transport.arena for port in ports]
    while running:
        moved = False
        for rank in tuple(running):
            wait = pending[rank]
            if wait is not None and not ports[rank].reached(wait):
                continue
            moved = True
            with _Watch(arenas, actions[rank]):
                pending[rank] = next(steps[rank], None)
            if pending[rank] is None:
                running.remove(rank)
        if not moved:
            tails = {rank: actions[rank][-3:] for rank in running}
            msg = f"ranks wait for each other, so none can finish: {tails}"
            raise AssertionError(msg)


class _DealtBlocks(WorkCounter):
    """A work counter that gives each block to the rank to which it is dealt."""

    __slots__ = ("_deal", "_rank")

    def __init__(self, pages: _RecordingPages) -> None:
        super().__init__(0, pages.size)
        self._deal = pages.deal
        self._rank = pages.rank

    def blocks(self, count: int) -> Iterator[int]:
        return (number for number in range(count) if self._deal(number) == self._rank)


class _RecordingChannel(Channel):
    """A channel that records what it publishes and what it has waited for."""

    __slots__ = ("actions",)

    def __init__(self, pages: ControlPages, index: int) -> None:
        super().__init__(pages, index)
        assert isinstance(pages, _RecordingPages)
        self.actions = pages.actions
        self._work_counter = _DealtBlocks(pages)

    def publish(self, audience: Audience | None = None, *, wake: bool = True) -> int:
        value = super().publish(audience, wake=wake)
        self.actions.append(Publish(self.index, value))
        return value

    def publish_and_wait(
        self, meanwhile: Callable[[], object] | None = None, *, pausing: bool = False
    ) -> Steps:
        yield from super().publish_and_wait(meanwhile, pausing=pausing)
        self.actions.extend(Acquire(peer, self.index, self.value) for peer in self.peers)

    def await_step(self, peer: int, value: int) -> Steps:
        yield from super().await_step(peer, value)
        self.actions.append(Acquire(peer, self.index, value))

    def has_published(self, peer: int, value: int) -> bool:
        published = super().has_published(peer, value)
        if published:  # later accesses depend on it
            self.actions.append(Acquire(peer, self.index, value))
        return published


class _RecordingPages(ControlPages):
    channel_type = _RecordingChannel

    def __init__(  # what a port is made of, the list to write to, and who does what
        self,
        transport: MemoryTransport,
        ranks: tuple[int, ...],
        group_rank: int,
        pages: list[int],
        actions: list[Action],
        deal: Callable[[int], int],
    ) -> None:
        self.actions = actions
        self.deal = deal
        super().__init__(transport, ranks, group_rank, pages)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook is untyped
    """A dispatch mode that records which shared bytes each torch operation touches."""

    def __init__(self, arenas: list[Arena], actions: list[Action]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arenas = arenas  # of all ranks: private memory is read at its owner's address
        self._actions = actions

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            schema = func._schema
            given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
            reads: set[Span] = set()
            writes: set[Span] = set()
            for argument in func._schema.arguments:
                for span in self._spans(given.get(argument.name)):
                    written = argument.alias_info is not None and argument.alias_info.is_write
                    (writes if written else reads).add(span)
            self._note(Access(frozenset(reads), frozenset(writes)))
        return func(*args, **kwargs)

    def _spans(self, value: object) -> list[Span]:
        tensors = value if isinstance(value, list | tuple) else [value]
        spans = []
        for x in tensors:
            if isinstance(x, torch.Tensor) and x.numel():
                address = x.data_ptr()
                places = (arena.origin(address) for arena in self._arenas)
                place = next((span for span in places if span is not None), None)
                if place is not None:
                    rank, extent, start = place
                    assert x.is_contiguous(), "algorithms touch shared memory in contiguous pieces"
                    spans.append(Span(rank, extent, start, start + x.numel() * x.element_size()))
        return spans

    def _note(self, access: Access) -> None:
        if not access.reads and not access.writes:
            return
        last = self._actions[-1] if self._actions else None
        if isinstance(last, Access):
            self._actions[-1] = Access(last.reads | access.reads, last.writes | access.writes)
        else:
            self._actions.append(access)
