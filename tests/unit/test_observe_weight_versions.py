"""A report shows how old the gradients of each stage were, and how many versions lived."""

from __future__ import annotations

from braid.launch.observe.timeline import read_timelines
from braid.launch.observe.weight_versions import VersionRow, version_rows, versions_text
from braid.runtime.events import EventRing, Recorder


def _ring(rank: int, stage: int, ages: tuple[int, ...], live: int) -> EventRing:
    ring = EventRing(bytearray(EventRing.nbytes_for(64)), 64, rank=rank)
    events = Recorder(ring)
    for age in ages:
        with events.span(f"STEP{stage}"):
            events.instant(f"gradient of stage {stage}", seq=age)
            events.instant(f"versions of stage {stage}", seq=live)
    return ring


def test_replicas_of_a_stage_are_summed_up():
    rings = [_ring(0, 0, (0, 1, 1), 2), _ring(1, 0, (2,), 3), _ring(2, 1, (0,), 1)]
    rows = version_rows(read_timelines([*rings, _ring(3, 2, (), 0)]))
    assert rows == (VersionRow(0, (0, 1), 4, 1.0, 2, 3), VersionRow(1, (2,), 1, 0.0, 0, 1))
    assert versions_text(rows)[0] == (
        "stage 0 (ranks 0,1): age of gradients 1.00 steps on average, 2 at most; live versions of "
        "weights: 3 at most"
    )
