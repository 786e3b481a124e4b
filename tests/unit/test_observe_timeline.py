"""Rings become shares and sentences with the right numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observe_job import ALL_REDUCE, MS, RecordedRank, build, late_job, train

from braid.launch.observe.facts import facts
from braid.launch.observe.intervals import Cover, EventInterval, lanes
from braid.launch.observe.operations import OperationSummary, bucket_waits, operations, percentile
from braid.launch.observe.timeline import StepKey, read_timelines, shares
from braid.runtime.text import (
    bytes_text,
    count_text,
    duration_text,
    number_text,
    percent_text,
)
from braid.types import Shares

PIECES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def _moments(pieces):
    return {moment for start, end in pieces for moment in range(start, end)}


@given(PIECES, PIECES, st.integers(0, 60), st.integers(0, 60))
def test_covers_are_sets_of_moments(a, b, start, end):
    left, right = _moments(a), _moments(b)
    window = set(range(start, end))
    difference = Cover(a).minus(Cover(b))
    assert _moments(Cover(a).pieces) == left
    assert _moments(difference.pieces) == left - right
    assert Cover(a).within(start, end) == len(left & window)
    if start <= end:
        assert _moments(Cover(a).clipped(start, end)) == left & window


@given(PIECES, st.booleans())
def test_events_of_a_lane_nest_or_are_disjoint(pieces, nest):
    intervals = sorted(
        (EventInterval(min(p), max(p) + 1, "x", "phase") for p in pieces),
        key=lambda i: (i.start_ns, -i.end_ns),
    )
    spread = lanes(intervals, nest=nest)
    assert sorted(i for lane in spread for i in lane) == sorted(intervals)
    for lane in spread:
        for index, a in enumerate(lane):
            for b in lane[index + 1 :]:
                inside = a.start_ns <= b.start_ns and b.end_ns <= a.end_ns
                assert b.start_ns >= a.end_ns or (nest and inside)


def test_a_step_divides_into_compute_wait_and_transfer():
    def only(rank):
        train(rank, 3, wait_ms=2)

    (timeline,) = read_timelines(build(only))
    step = timeline.steps[1]
    assert (step.compute_ns, step.wait_ns, step.transfer_ns) == (7 * MS, 2 * MS, 1 * MS)
    assert step.phases == {
        "data": 1 * MS,
        "forward": 2 * MS,
        "backward": 4 * MS,
        "optimizer": 1 * MS,
        "between steps": 0,
    }
    assert shares(timeline) == pytest.approx(Shares(0.7, 0.2, 0.1))


def test_a_collective_behind_backward_counts_only_from_the_last_own_work_on():
    def overlapping(rank):
        with rank.recorder.span("step"), rank.recorder.span("backward"):
            first = rank.recorder.span(ALL_REDUCE, channel=5, seq=1)
            rank.work(8)
            second = rank.recorder.span(ALL_REDUCE, channel=6, seq=1)
            rank.work(1)
            first.end()
            second.end()
            rank.work(1)

    (timeline,) = read_timelines(build(overlapping))
    assert shares(timeline) == pytest.approx(Shares(0.9, 0.0, 0.1))


@st.composite
def _recordings(draw):
    """Spans of all kinds, begun and ended in any order, some never."""
    kinds = ["step", "wait", "forward", "bucket 1 of 2", ALL_REDUCE]
    rank = RecordedRank(0)
    open_spans = []
    for _ in range(draw(st.integers(0, 25))):
        rank.work(draw(st.integers(0, 3)))
        if open_spans and draw(st.booleans()):
            open_spans.pop(draw(st.integers(0, len(open_spans) - 1))).end()
        else:
            kind = draw(st.sampled_from(kinds))
            open_spans.append(rank.recorder.span(kind, channel=draw(st.integers(0, 2))))
    return rank.ring


@given(_recordings(), st.booleans())
def test_shares_add_up_to_one_whatever_was_recorded(ring, failed):
    (timeline,) = read_timelines([ring], failed=failed)
    found = shares(timeline)
    total = sum(end - start for start, end in timeline.windows)
    assert sum(found) == pytest.approx(1.0 if total else 0.0)
    assert all(-1e-9 <= share <= 1 for share in found)
    for step in timeline.steps:
        assert step.compute_ns >= 0
        assert step.compute_ns + step.wait_ns + step.transfer_ns == step.dur_ns


def test_ranks_of_other_hosts_are_moved_by_their_clock_offset():
    here, there = RecordedRank(0, start_ms=1000), RecordedRank(1, start_ms=4000)
    there.ring.clock_offset_ns = -2995 * MS
    for rank in (there, here):
        rank.phase("forward", 2)
    found = [timeline.intervals[0] for timeline in read_timelines([there.ring, here.ring])]
    assert [(i.start_ns, i.end_ns) for i in found] == [(0, 2 * MS), (5 * MS, 7 * MS)]


def test_an_open_span_lasts_until_the_last_event_of_any_rank():
    def dies(rank):
        rank.recorder.span("step", seq=3)
        rank.work(1)

    def survives(rank):
        rank.phase("forward", 30)

    found, _ = read_timelines(build(dies, survives))
    (step,) = found.steps
    assert (step.open, step.dur_ns) == (True, 30 * MS)


def test_a_collective_that_never_ended_counts_as_waiting():
    def stuck(rank):
        rank.recorder.span("step")
        rank.work(2)
        rank.recorder.span(ALL_REDUCE, channel=5, seq=1)

    def slow(rank):
        rank.phase("load", 10)

    found, _ = read_timelines(build(stuck, slow))
    assert shares(found) == pytest.approx(Shares(0.2, 0.8, 0.0))


def test_in_a_failed_run_the_last_step_is_unfinished_and_its_last_collective_was_waiting():
    def survivor(rank):
        train(rank, 2)
        with rank.recorder.span("step", seq=2):
            rank.work(1)
            rank.reduce(9, wait_ms=0, transfer_ms=3)

    (well,) = read_timelines(build(survivor))
    (failed,) = read_timelines(build(survivor), failed=True)
    assert [step.open for step in failed.steps] == [False, False, True]
    assert (well.steps[2].wait_ns, failed.steps[2].wait_ns) == (0, 3 * MS)
    assert shares(failed) == pytest.approx(Shares(0.875, 0.0, 0.125))


def test_steps_with_the_same_number_are_told_apart():
    def twice(rank):
        train(rank, 2)
        train(rank, 2)

    (timeline,) = read_timelines(build(twice))
    assert [step.key for step in timeline.steps] == [
        StepKey(0, 0), StepKey(0, 1), StepKey(1, 0), StepKey(1, 1),
    ]  # fmt: skip


def test_facts_name_the_late_rank_its_phase_and_its_step():
    assert facts(read_timelines(late_job())) == [
        "2 ranks are equally fast: 8 ms of own work per step, within 5 %",
        "ranks waited longest for bucket 1 of 1 (3.91 KiB): 12 ms in all, 100 % of it on rank 0",
        "step 4 took longest: 20 ms, the median is 8 ms; rank 1 was 12 ms late in forward of step 4",
    ]


def test_facts_name_a_rank_that_is_always_slow():
    first, second = RecordedRank(0), RecordedRank(1)
    train(first, 4, wait_ms=2)
    train(second, 4, late=dict.fromkeys(range(4), 2.0))
    assert facts(read_timelines([first.ring, second.ring]))[0] == (
        "rank 1 is the slowest: 10 ms of own work per step, 25 % more than rank 0 (8 ms)"
    )


def test_a_rank_late_between_steps_is_named():
    first, second = RecordedRank(0), RecordedRank(1)
    for step in range(4):
        late = 9 if step == 2 else 0
        second.work(late)
        for rank, wait in ((first, late), (second, 0)):
            with rank.recorder.span("step", seq=step):
                rank.phase("forward", 2)
                rank.reduce(step + 1, wait_ms=wait, transfer_ms=1)
    assert facts(read_timelines([first.ring, second.ring]))[-1].endswith(
        "rank 1 was 9 ms late between steps before step 2"
    )


def test_a_step_that_was_long_for_all_ranks_blames_the_phase():
    ranks = [RecordedRank(0), RecordedRank(1)]
    for rank in ranks:
        train(rank, 5, late={3: 10.0})
    assert facts(read_timelines([rank.ring for rank in ranks]))[-1] == (
        "step 3 took longest: 18 ms, the median is 8 ms; all ranks needed 10 ms more than usual in forward"
    )


def test_no_events_say_nothing():
    assert facts(read_timelines([])) == []
    (timeline,) = read_timelines([RecordedRank(0).ring])
    assert shares(timeline) == Shares(0.0, 0.0, 0.0)
    assert facts([timeline]) == []


def test_operations_sum_up_calls_of_all_ranks():
    assert operations(read_timelines(late_job())) == [
        OperationSummary(
            name=ALL_REDUCE,
            site="train.py:6 in <module>",
            calls=12,
            nbytes=48_000,
            total_ns=24 * MS,
            p50_ns=1 * MS,
            p95_ns=13 * MS,
            wait_share=0.5,
            num_open=0,
        )
    ]


def test_a_wait_belongs_to_the_bucket_whose_request_was_under_way_on_its_channel():
    def overlapping(rank):
        outer = [rank.recorder.span(f"bucket {b + 1} of 2", seq=b, nbytes=100 + b) for b in (0, 1)]
        inner = [
            rank.recorder.span(ALL_REDUCE, channel=5 + b, seq=1, nbytes=100 + b) for b in (0, 1)
        ]
        rank.work(4)
        rank.recorder.complete("wait", rank.clock.now_ns() - MS, MS, channel=6, seq=1)
        for span in (*inner, *outer):
            span.end()

    # both buckets begin before both requests here, so only the second, which is the nearest, can be matched
    assert [(b.name, b.wait_ns) for b in bucket_waits(read_timelines(build(overlapping)))] == [
        ("bucket 2 of 2", MS)
    ]


@given(st.lists(st.integers(0, 100), min_size=1), st.sampled_from([0.5, 0.95]))
def test_a_percentile_is_the_smallest_value_that_enough_others_do_not_exceed(values, fraction):
    found = percentile(values, fraction)
    assert found in values
    assert sum(v <= found for v in values) >= fraction * len(values)
    assert sum(v < found for v in values) < fraction * len(values)


def test_numbers_carry_units_and_three_digits():
    assert [duration_text(ns) for ns in (0, 999, 12_345, 12_345_678, 3.2e9, 125e9, 3780e9)] == [
        "0 ns", "999 ns", "12.3 us", "12.3 ms", "3.2 s", "2 min 5 s", "1 h 3 min",
    ]  # fmt: skip
    assert [bytes_text(n) for n in (0, 512, 1536, 64 << 20)] == [
        "0 B",
        "512 B",
        "1.5 KiB",
        "64 MiB",
    ]
    assert [count_text(n) for n in (0, 950, 12_400, 3.2e6)] == ["0", "950", "12.4k", "3.2M"]
    assert [percent_text(f) for f in (0, 0.0001, 0.004, 0.123)] == [
        "0 %",
        "< 0.1 %",
        "0.4 %",
        "12 %",
    ]
    assert [number_text(x) for x in (1.0, 0.0123, 99.96, 1e-7)] == ["1", "0.0123", "100", "1e-07"]


def _averages(rank: RecordedRank, steps: int, *, first_logged: int | None = None) -> None:
    """Join, then work 8 ms, average 2 ms, and log the step."""
    with rank.recorder.span("init(measuring costs)"):
        rank.work(50)
    for step in range(steps):
        rank.work(8)
        with rank.recorder.span("bucket 1 of 1", nbytes=4000):
            rank.reduce(step + 1, wait_ms=0, transfer_ms=2)
        if first_logged is not None:
            rank.recorder.instant("log", seq=first_logged + step)


def test_averagings_are_the_steps_of_a_program_that_records_none():
    ranks = [RecordedRank(0), RecordedRank(1)]
    for rank in ranks:
        _averages(rank, 4, first_logged=20)
    timelines = read_timelines([rank.ring for rank in ranks])
    for timeline in timelines:
        assert [(s.key.seq, s.dur_ns) for s in timeline.steps] == [
            (20 + i, 10 * MS) for i in range(4)
        ]
        assert shares(timeline) == pytest.approx((0.8, 0.0, 0.2))  # without joining


def test_steps_keep_their_numbers_when_one_ring_has_lost_its_first_events():
    whole, torn = RecordedRank(0), RecordedRank(1, capacity=7)  # three events a step
    for rank in (whole, torn):
        _averages(rank, 9, first_logged=0)
    first, second = read_timelines([whole.ring, torn.ring])
    assert [s.key.seq for s in first.steps] == list(range(9))
    assert [s.key.seq for s in second.steps] == [8]


def test_what_follows_the_last_averaging_of_a_failed_run_is_an_open_step():
    rank = RecordedRank(0)
    _averages(rank, 3)
    rank.phase("load", 5)
    (timeline,) = read_timelines([rank.ring], failed=True)
    assert [(s.key.seq, s.open) for s in timeline.steps] == [
        (0, False),
        (1, False),
        (2, False),
        (3, True),
    ]


@pytest.mark.parametrize("first_logged", [None, 20])
@pytest.mark.parametrize("capacities", [(16, 4096), (16, 25), (4096, 16, 25), (10, 4096, 16)])
def test_ranks_that_have_lost_different_numbers_of_events_number_steps_alike(
    capacities, first_logged
):
    ranks = [RecordedRank(r, capacity=capacity) for r, capacity in enumerate(capacities)]
    for rank in ranks:
        _averages(rank, 9, first_logged=first_logged)
    timelines = read_timelines([rank.ring for rank in ranks])
    ends = [{s.end_ns: s.key.seq for s in timeline.steps} for timeline in timelines]
    longest = max(ends, key=len)
    assert sorted(longest.values()) == list(range(min(longest.values()), max(longest.values()) + 1))
    assert all(seqs.items() <= longest.items() for seqs in ends)
    if first_logged is not None:
        assert [max(seqs.values()) for seqs in ends] == [28] * len(ranks)


def test_groups_that_share_no_averaging_have_the_numbers_that_their_own_program_logs():
    ranks = [RecordedRank(0), RecordedRank(1, capacity=16)]
    for rank in ranks:
        for step in range(9):
            rank.work(8)
            with rank.recorder.span("bucket 1 of 1", nbytes=4000):
                rank.reduce(step + 1, wait_ms=0, transfer_ms=2, channel=5 + rank.ring.rank)
            rank.recorder.instant("log", seq=step)
    first, second = read_timelines([rank.ring for rank in ranks])
    assert [s.key.seq for s in first.steps] == list(range(1, 9))
    assert [s.key.seq for s in second.steps][-1] == 8
