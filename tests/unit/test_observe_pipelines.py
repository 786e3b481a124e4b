"""Passes of a pipeline come out of a recording with their program, their idle times and a prediction."""

from __future__ import annotations

from itertools import pairwise

import pytest
from observe_job import MS, RecordedRank, late_job, write_run

from braid.launch.observe import build_story, read_run, render_page
from braid.launch.observe.passes import passes, schedule_name
from braid.launch.observe.pipelines import pipeline_views
from braid.launch.observe.timeline import read_timelines
from braid.programs.schedule import Costs, simulate
from braid.programs.schedule.pipeline import SCHEDULES, with_recompute
from braid.programs.schedule.program import SEND
from braid.programs.schedule.simulate import Route
from braid.runtime.events import EventRing

FORWARD, BACKWARD = 2, 4  # ms


class Instant:
    bytes_per_s = ()
    burst_bytes = ()

    def route(self, *_):
        return Route(0.0, ())


def record(rank: RecordedRank, name: str, seq: int, start_ms: float, end_ms: float) -> None:
    rank.recorder.complete(name, round(start_ms * MS), round((end_ms - start_ms) * MS), seq=seq)


def simulated(program, *, transfer_ms=0.0):
    """Milliseconds of the work of each rank, by the simulator: (action, begin, end)."""
    spent = {"F": FORWARD, "B": BACKWARD, "I": 2, "W": 2, "R": FORWARD}
    costs = Costs(
        lambda *_: 0.0,
        lambda _, action: spent.get(action.kind, transfer_ms) / 1e3,
    )
    timeline = simulate(program, costs, Instant(), buffered=True)
    work = [[] for _ in range(program.num_ranks)]
    for interval in timeline.intervals:
        if not interval.is_message and interval.end_s > interval.start_s:
            work[interval.rank].append(
                (interval.action, interval.start_s * 1e3, interval.end_s * 1e3)
            )
    return work, timeline.seconds * 1e3


def recorded(program, *, num_passes=3, transfer_ms=0.0, capacity=4096) -> list[EventRing]:
    """Rings of ranks that run a program some times, and are blocked by nothing but its order."""
    work, lasts_ms = simulated(program, transfer_ms=transfer_ms)
    ranks = [RecordedRank(r, capacity=capacity) for r in range(program.num_ranks)]
    for number in range(num_passes):
        begin = 1000 + number * (lasts_ms + 5)
        for rank, own in zip(ranks, work, strict=True):
            free = begin
            times = {(a.kind, a.unit, a.index): (begin + s, begin + e) for a, s, e in own}
            for action in program.ranks[rank.ring.rank]:
                name = f"{action.kind}{action.unit}"
                start, end = times.get((action.kind, action.unit, action.index), (free, free))
                if program.vocabulary.role(action) == SEND or end == start:
                    continue
                if action.kind.startswith("recv"):
                    record(rank, name, action.index, free, end)
                    if start > free:
                        record(rank, "wait", action.index, free, start)
                else:
                    record(rank, name, action.index, start, end)
                free = end
    return [rank.ring for rank in ranks]


def views(rings):
    return pipeline_views(read_timelines(rings))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv"])
def test_the_program_of_a_recording_is_the_one_that_was_run(name):
    program = SCHEDULES[name](2, 4)
    (own,) = passes(read_timelines(recorded(program)))
    assert own.program.ranks == program.ranks
    assert (own.ranks, len(own.passes), schedule_name(own.program)) == ((0, 1), 3, name)


@pytest.mark.parametrize("transfer_ms", [0.0, 0.5])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_a_run_without_disturbances_is_predicted_exactly(name, transfer_ms):
    program = SCHEDULES[name](3, 6)
    _, lasts_ms = simulated(program, transfer_ms=transfer_ms)
    (view,) = views(recorded(program, transfer_ms=transfer_ms))
    assert view.measured_ns == pytest.approx(lasts_ms * MS)
    assert view.predicted_ns == pytest.approx(lasts_ms * MS)
    for row in view.rows:
        assert tuple(row.measured) == pytest.approx(tuple(row.predicted), abs=10)
        assert sum(row.measured) == pytest.approx(lasts_ms * MS)
        assert (row.measured.transfer_ns > 0) is (transfer_ms > 0)


def test_idle_time_is_that_of_the_schedule():
    (view,) = views(recorded(SCHEDULES["1f1b"](2, 4)))
    measured = [tuple(x / MS for x in row.measured) for row in view.rows]
    # rank 0: F0 F1 . . B0 F2 . . B1 ...; rank 1 has no gap between its first and its last work
    assert measured == [(24, 0, 4, 0, 2), (24, 0, 2, 0, 4)]
    assert [row.measured.bubble for row in view.rows] == pytest.approx([1 / 5, 1 / 5])
    assert view.title == "1f1b, 4 micro-batches, ranks 0, 1"


def test_a_slow_receiver_is_not_a_slow_sender():
    """A wait counts as idle time of the rank that waits, and the transfer as a transfer."""
    rings = recorded(SCHEDULES["1f1b"](2, 2), num_passes=2, transfer_ms=1.0)
    (view,) = views(rings)
    first, second = (row.measured for row in view.rows)
    assert (first.transfer_ns, second.transfer_ns) == (2 * MS, 2 * MS)
    assert first.warmup_ns > 0
    assert second.warmup_ns == FORWARD * MS


def test_passes_that_only_infer_and_other_batches_do_not_count():
    program, shorter = SCHEDULES["1f1b"](2, 4), SCHEDULES["1f1b"](2, 3)
    forward = SCHEDULES["forward"](2, 4)
    ranks = [RecordedRank(r) for r in range(2)]
    begin = 1000.0
    for one in (program, forward, program, shorter, program, forward):
        work, lasts_ms = simulated(one)
        for rank, own in zip(ranks, work, strict=True):
            for action, start, end in own:
                name = f"{action.kind}{action.unit}"
                record(rank, name, action.index, begin + start, begin + end)
        begin += lasts_ms + 1
    (own,) = passes(read_timelines([rank.ring for rank in ranks]))
    assert own.program.ranks == program.ranks
    assert len(own.passes) == 3


@pytest.mark.parametrize("capacity", range(33, 52))
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_passes_whose_beginning_was_overwritten_are_left_out(name, capacity):
    program = SCHEDULES[name](2, 2)
    whole = recorded(program, num_passes=16)
    short = recorded(program, num_passes=16, capacity=capacity)
    for rings in ([short[0], whole[1]], [whole[0], short[1]], short):
        (own,) = passes(read_timelines(rings))
        assert 1 <= len(own.passes) < 16
        assert own.program.ranks == program.ranks
        assert {len(actions) for one in own.passes for actions in one.actions[:1]} == {
            len(own.passes[0].actions[0])
        }


def test_replicas_are_pipelines_of_their_own():
    rings = recorded(SCHEDULES["1f1b"](2, 4))
    others = recorded(SCHEDULES["1f1b"](2, 4), transfer_ms=1.0)
    every = []
    for number, ring in enumerate((rings[0], others[0], rings[1], others[1])):  # by stage
        raw = RecordedRank(number)
        for event in ring.tail():
            name = ring.name(event.kind)
            raw.recorder.complete(name, event.t_ns, event.dur_ns, seq=event.seq)
        every.append(raw.ring)
    shown = views(every)
    assert [[row.rank for row in view.rows] for view in shown] == [[0, 2], [1, 3]]
    assert shown[0].measured_ns < shown[1].measured_ns


def test_recomputation_is_work_and_has_no_name_of_its_own():
    program = with_recompute(SCHEDULES["gpipe"](2, 3), "always")
    (view,) = views(recorded(program))
    assert view.title.startswith("gpipe, 3 micro-batches")
    assert view.kinds == ("forward", "backward", "recompute")
    assert view.rows[0].measured.work_ns == 3 * (2 * FORWARD + BACKWARD) * MS


def test_a_recording_without_a_pipeline_has_none():
    assert views(late_job()) == ()
    lone = RecordedRank(0)
    for i in range(3):
        record(lone, "F1", i, 10 * i, 10 * i + 5)  # stage 0 is on a rank that was not recorded
    assert views([lone.ring]) == ()


def test_the_page_shows_both_timelines_on_one_axis(tmp_path):
    rings = recorded(SCHEDULES["1f1b"](2, 4), transfer_ms=0.5)
    html = render_page(
        build_story(read_run(write_run(tmp_path / "run", rings))), trace="", machine=""
    )
    for text in ("1f1b, 4 micro-batches, ranks 0, 1", "Predicted by the simulator", "steady idle"):
        assert text in html
    (view,) = views(rings)
    measured, predicted = view.pictures
    assert measured.x_ticks == predicted.x_ticks
    for one, other in zip(measured.lanes, predicted.lanes, strict=True):
        lefts = [box.x for box in one.phases]
        assert lefts == pytest.approx([box.x for box in other.phases], abs=0.01)
        assert [box.role for box in one.phases].count("backward") == 4
        assert all(b - a > 0 for a, b in pairwise(lefts))
    plain = render_page(
        build_story(read_run(write_run(tmp_path / "plain", late_job()))), trace="", machine=""
    )
    assert "Predicted by the simulator" not in plain
