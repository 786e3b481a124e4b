"""A report shows how stale pushes were, which pulls waited, and what came too late."""

from __future__ import annotations

from braid.launch.observe.servers import ServerRow, servers, servers_text
from braid.launch.observe.timeline import read_timelines
from braid.runtime.events import EventRing, Recorder


def _ring(rank: int, *, serves: bool) -> EventRing:
    ring = EventRing(bytearray(EventRing.nbytes_for(64)), 64, rank=rank)
    events = Recorder(ring)
    with events.span("serve"):
        for lag in (0, 0, 1, 20) if serves else ():
            events.instant("push", seq=lag)
        if serves:
            events.instant("late push", seq=3)
            events.complete("parked pull", events.now_ns(), 2_000_000)
            events.complete("parked pull", events.now_ns(), 4_000_000)
    return ring


def test_servers_are_summed_up_by_rank():
    rows = servers(read_timelines([_ring(0, serves=False), _ring(1, serves=True)]))
    assert rows == (
        ServerRow(
            rank=1,
            staleness={0: 2, 1: 1, 20: 1},
            parked=2,
            parked_ns=6_000_000,
            p50_ns=2_000_000,
            p95_ns=4_000_000,
            late=1,
        ),
    )
    (line,) = servers_text(rows)
    assert line == (
        "rank 1 served 4 pushes (staleness 0: 50 %, 1: 25 %, 12 or more: 25 %); 2 pulls waited "
        "6 ms in all, half of them less than 2 ms; 1 late pushes were dropped"
    )
