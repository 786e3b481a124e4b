"""Who is behind with which bucket, of the steps that all ranks have on record."""

from __future__ import annotations

import math

import pytest
from observe_job import CAPACITY, MS, RecordedRank, late_job, write_run

from braid.launch.observe import build_story, read_run, read_timelines, render_page
from braid.launch.observe.buckets import LateBucket, averagings, late_buckets, more_often_than
from braid.launch.observe.facts import facts

STEP_MS = 20.0


def averages(rank: RecordedRank, steps: int, late: dict[int, float], *, group: int = 1) -> None:
    """Steps of 20 ms with two buckets: full after 5 ms, and after 10 ms and what `late` says."""
    for step in range(steps):
        behind = late.get(step, 0.0)
        rank.work(5)
        one = rank.recorder.span("bucket 1 of 2", seq=0, nbytes=4000)
        rank.work(5 + behind)
        two = rank.recorder.span("bucket 2 of 2", seq=1, nbytes=400)
        # all requests begin when both are full, and end on all ranks at once
        name = "all_reduce(float64[5], sum)"
        call = rank.recorder.span(name, group=group, channel=5, seq=step + 7)
        rank.work(STEP_MS - 11 - behind)
        for span in (call, one, two):
            span.end()
        rank.work(1)


def job(steps: int, late: dict[int, float], *, capacity: int = CAPACITY) -> list[RecordedRank]:
    ranks = [RecordedRank(0), RecordedRank(1, capacity=capacity), RecordedRank(2)]
    for rank in ranks:
        averages(rank, steps, late if rank.ring.rank == 1 else {})
    return ranks


def rows(ranks: list[RecordedRank]) -> list[LateBucket]:
    """Rows of late buckets, without the probability of chance."""
    found = late_buckets(read_timelines([rank.ring for rank in ranks]))
    return [row._replace(chance=1.0) for row in found]


def test_the_rank_that_is_behind_is_told_with_its_bucket_by_how_much_and_how_often():
    found = rows(job(101, dict.fromkeys(range(14, 101), 6.0)))
    assert found == [
        LateBucket("bucket 1 of 2", 4000, -1, 0, 0, 0, 100),
        LateBucket("bucket 2 of 2", 400, 1, 6 * MS, 87, 100, 100),
    ]
    assert [str(row) for row in found] == [
        "bucket 1 of 2: no rank was behind in 100 steps",
        "bucket 2 of 2: rank 1 was behind by 6 ms in 87 of 100 steps",
    ]


def test_a_lateness_that_is_small_against_the_step_is_none():
    assert [row.num_behind for row in rows(job(10, dict.fromkeys(range(10), 0.9)))] == [0, 0]


def test_steps_are_matched_by_their_collectives_when_one_rank_has_lost_the_first_ones():
    whole = rows(job(60, {55: 6.0, 5: 6.0}))
    torn = rows(job(60, {55: 6.0, 5: 6.0}, capacity=3 * 30))  # three events a step
    assert [(row.num_behind, row.num_averagings) for row in whole] == [(0, 59), (2, 59)]
    assert torn[1] == whole[1]._replace(num_behind=1)
    assert len(averagings(read_timelines([rank.ring for rank in job(8, {})]))) == 8


def test_ranks_of_other_groups_are_behind_nobody_here():
    ranks = [RecordedRank(rank, start_ms=1000 + 8 * (rank // 2)) for rank in range(4)]
    for rank in ranks:
        late = {4: 6.0, 5: 6.0} if rank.ring.rank == 3 else {}
        averages(rank, 6, late, group=1 + rank.ring.rank // 2)
    assert rows(ranks) == [
        LateBucket("bucket 1 of 2", 4000, -1, 0, 0, 0, 5),
        LateBucket("bucket 1 of 2", 4000, -1, 0, 0, 0, 5),
        LateBucket("bucket 2 of 2", 400, -1, 0, 0, 5, 5),
        LateBucket("bucket 2 of 2", 400, 3, 6 * MS, 2, 5, 5),
    ]


def test_one_rank_alone_is_behind_nobody():
    assert rows(job(5, {})[:1]) == []
    assert late_buckets([]) == []


def test_a_rank_that_is_mostly_behind_is_a_fact_and_one_that_once_was_is_not():
    mostly = read_timelines([rank.ring for rank in job(9, dict.fromkeys(range(4, 9), 6.0))])
    behind = "bucket 2 of 2: rank 1 was behind by 6 ms in 5 of 8 steps, and the other ranks waited"
    assert behind in facts(mostly)
    once = facts(read_timelines(late_job()))
    assert not any("was behind" in fact for fact in once)


def test_the_page_has_a_row_for_each_bucket_and_marks_the_critical_one(tmp_path):
    ranks = job(9, dict.fromkeys(range(4, 9), 6.0))
    path = write_run(tmp_path / "run", [rank.ring for rank in ranks])
    page = render_page(build_story(read_run(path)), trace="trace.json", machine="m")
    assert page.count("critical: all ranks wait for it") == 1
    assert "<th>bucket 2 of 2<span" in page
    assert "<td>rank 1</td><td>6 ms</td>" in page
    assert "<td>5 of 8</td><td>8 of 8</td>" in page
    assert "Gradient buckets" not in render_page(
        build_story(read_run(write_run(tmp_path / "alone", [ranks[0].ring]))), trace="", machine="m"
    )


def test_the_side_of_a_coin_is_no_rank_that_is_behind():
    ranks = [RecordedRank(0), RecordedRank(1)]
    for rank in ranks:
        averages(rank, 200, {step: 6.0 for step in range(200) if step % 2 == rank.ring.rank})
    (_, row) = late_buckets(read_timelines([rank.ring for rank in ranks]))
    assert (row.num_behind, row.num_averagings, row.is_significant) == (100, 199, False)
    assert not any("was behind" in f for f in facts(read_timelines([r.ring for r in ranks])))


@pytest.mark.parametrize(
    ("count", "num_trials", "chance"),
    [(0, 10, 0.5), (10, 10, 0.5), (106, 199, 0.5), (5, 5, 1 / 3), (2, 3, 1.0), (1, 4, 0.25)],
)
def test_the_tail_of_the_binomial_distribution(count, num_trials, chance):
    expected = sum(
        math.comb(num_trials, k) * chance**k * (1 - chance) ** (num_trials - k)
        for k in range(count, num_trials + 1)
    )
    assert more_often_than(count, num_trials, chance) == pytest.approx(expected, rel=1e-9)
