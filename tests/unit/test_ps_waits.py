"""What a node records of the requests that it makes and holds."""

from __future__ import annotations

from braid.ps.messages import Barrier, Pull
from braid.ps.waits import Waits
from braid.runtime.clock import VirtualClock
from braid.runtime.events import EventRing, Recorder

RANKS = {"scheduler": 0, "server:0": 1, "worker:0": 2, "worker:1": 3}


class Recorded:
    """A node with its clock and its events."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        ring = EventRing(bytearray(EventRing.nbytes_for(64)), 64)
        self.recorder = Recorder(ring, self.clock)
        self.waits = Waits(self.recorder, self.clock, RANKS)

    def hold(self, progress: int, *nodes: str) -> list[str]:
        """Look a second later; return the spans that are open."""
        self.clock.advance(1_000_000_000)
        self.waits.hold(lambda: (frozenset(nodes), ["worker 0 waits"], progress))
        ring = self.recorder.ring
        return [ring.name(event.kind) for event in ring.tail(64) if event.open]


def test_what_is_held_while_nothing_goes_on_is_recorded_until_something_does():
    node = Recorded()
    held = "hold(worker 0 waits, asked of ranks 2,3)"
    seen = [node.hold(*each) for each in ((1, "worker:1", "worker:0"),) * 3]
    seen += [node.hold(2, "worker:1", "worker:0"), node.hold(2)]
    assert seen == [[], [held], [held], [], []]


def test_a_worker_that_another_process_has_replaced_is_not_named_by_its_first_rank():
    node = Recorded()
    node.waits.note_lives({0: 7, 1: 8})
    node.waits.note_lives({0: 7, 1: 9})
    assert [node.hold(1, "worker:1") for _ in range(2)] == [[], []]


def test_requests_are_named_with_the_ranks_that_must_answer():
    node = Recorded()
    node.clock.advance(1)  # a record without a time is empty
    pull = Pull(0, "w", 5, (0,), [[]])
    for message, nodes in ((pull, ["server:0", "server:9"]), (Barrier("end", ()), ["scheduler"])):
        span = node.waits.ask(message, nodes, 4)
        assert span is not None
    ring = node.recorder.ring
    assert [(ring.name(event.kind), event.seq) for event in ring.tail(64)] == [
        ("pull(table 'w', asked of rank 1)", 5),
        ("barrier('end', asked of rank 0)", 4),
    ]
