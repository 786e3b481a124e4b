"""Spans of waits, with which the launcher reports the rank that blocks a stalled run.

    rank 3   pull(table 'w', asked of rank 1) ────────────────────────────
    rank 1   hold(worker 0 waits at clock 3 for ..., asked of rank 4) ────

A worker sends requests to servers or the scheduler, which hold a request until other nodes have
sent theirs. A report follows the requests to the rank that all others wait for. A node records a
span for a request that it holds only after about a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from braid.ps.messages import Barrier, NextData, NodeJoin, Pull, Push, TableChange
from braid.runtime.clock import Clock
from braid.runtime.events import Recorder, Span
from braid.runtime.message import Message
from braid.types import text_digest

__all__ = ["Awaited", "Waits"]

GROUP = text_digest("parameter server") >> 1
LOOK_NS = 1_000_000_000  # between two checks of the requests that a node holds
MAX_TEXT = 200

# the nodes for which requests wait here, lines about them, and a number that grows with progress
Awaited = tuple[frozenset[str], list[str], int]


class Waits:
    """Records which nodes a node waits for, for hang reports.

    Args:
        events: Recorder that the launcher reads.
        clock: Clock of the node.
        ranks: Rank of each node; other nodes are not recorded.
    """

    def __init__(self, events: Recorder, clock: Clock, ranks: Mapping[str, int]) -> None:
        self._events, self._clock, self._ranks = events, clock, ranks
        self._lives: dict[int, int] = {}
        self._replaced: set[str] = set()  # nodes with a later process, which has another rank
        self._held: tuple[frozenset[str], int] | None = None
        self._span: Span | None = None
        self._due_ns = 0

    def note_lives(self, lives: Mapping[int, int]) -> None:
        """Record each worker's process: `lives` maps a worker to a number of its process."""
        for worker, life in lives.items():
            if self._lives.setdefault(worker, life) != life:
                self._replaced.add(f"worker:{worker}")

    def ask(self, message: Message | None, nodes: Iterable[str], number: int) -> Span | None:
        """Begin a span of the wait for some nodes' answers to a request; None for unknown nodes.

        Args:
            message: The request.
            nodes: The nodes that have not answered.
            number: Number of the request.
        """
        ranks = self._ranks_of(nodes)
        if not ranks:
            return None
        what, number = _described(message, number)
        return self._events.span(
            f"{what}, asked of {ranks})",
            group=GROUP,
            seq=max(2, number),  # hang reports give the first operation of a group more time
            site=self._events.site(),
        )

    def hold(self, awaited: Callable[[], Awaited]) -> None:
        """Record which nodes must act before this node can answer the requests that it holds.

        Call it often; it looks at `awaited()` at most once a second.
        """
        if not self._ranks:
            return
        now_ns = self._clock.now_ns()
        if now_ns < self._due_ns:
            return
        self._due_ns = now_ns + LOOK_NS
        nodes, lines, progress = awaited()
        before, self._held = self._held, (nodes, progress)
        if self._span is not None and before != self._held:
            self._span.end()
            self._span = None
        ranks = self._ranks_of(nodes)
        if self._span is None and before == self._held and ranks:
            text = "; ".join(lines)[:MAX_TEXT]
            self._span = self._events.span(
                f"hold({text}, asked of {ranks})", group=GROUP, channel=1, seq=2
            )

    def _ranks_of(self, nodes: Iterable[str]) -> str:
        ranks, replaced = self._ranks, self._replaced
        known = {ranks[node] for node in nodes if node in ranks and node not in replaced}
        return f"rank{'s' * (len(known) > 1)} {','.join(map(str, sorted(known)))}" if known else ""


def _described(message: Message | None, number: int) -> tuple[str, int]:
    """Return the beginning of a span's name, and its number."""
    match message:
        case Push(table=table, clock=clock):
            return f"push(table {table!r}", clock
        case Pull(table=table, clock=clock):
            return f"pull(table {table!r}", clock
        case TableChange(table=table, clock=clock):
            return f"change(table {table!r}", clock
        case Barrier(name=name):
            return f"barrier({name!r}", number
        case NextData(name=name):
            return f"samples({name!r}", number
        case NodeJoin():
            return "join(all servers and workers", number
        case _:
            return "request(", number
