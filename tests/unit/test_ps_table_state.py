"""A table's server decides alike for any order of messages, and breaks no promise of its consistency."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import CommError, ConfigError
from braid.ps.consistency import BSP, Consistency
from braid.ps.table_state import Answer, Apply, Drop, Keep, TableState


def applied(instructions):
    return [each for each in instructions if isinstance(each, Apply)]


def answered(instructions):
    return [each.request for each in instructions if isinstance(each, Answer)]


def test_a_clock_is_applied_once_in_the_order_of_workers():
    table = TableState(range(3), BSP)
    assert table.push(2, 0) == [Keep(2, 0)]
    assert table.push(0, 0) == [Keep(0, 0)]
    assert table.pull(0, 1, 7) == []
    assert table.waiting() == ["worker 0 waits at clock 1 for the pushes of 1 (at clock 0)"]
    assert table.push(1, 0) == [
        Keep(1, 0),
        Apply(((0, 0), (1, 0), (2, 0)), 1 / 3),
        Answer(0, 7),
    ]
    assert table.pull(1, 1, 8) == [Answer(1, 8)]


class Workers:
    """Workers that pull and push in turn, as a schedule says who is next."""

    def __init__(self, count: int, consistency: Consistency) -> None:
        self.table = TableState(range(count), consistency)
        self.clocks = [0] * count
        self.pulling = [False] * count
        self.applies: list[Apply] = []
        self.apart = 0

    def turn(self, worker: int) -> None:
        if self.pulling[worker]:
            return  # its pull is parked
        self.pulling[worker] = True
        self.take(self.table.pull(worker, self.clocks[worker], worker))

    def take(self, instructions: list[object]) -> None:
        self.applies += applied(instructions)
        for worker in answered(instructions):
            self.apart = max(self.apart, self.clocks[worker] - min(self.clocks))
            self.pulling[worker] = False
            self.clocks[worker] += 1
            self.take(self.table.push(worker, self.clocks[worker] - 1))


@given(
    count=st.integers(1, 4),
    staleness=st.sampled_from([0, 1, 3, math.inf]),
    turns=st.lists(st.integers(0, 3), max_size=60),
)
def test_no_worker_is_further_ahead_than_allowed_and_nothing_is_lost(count, staleness, turns):
    workers = Workers(count, Consistency(staleness=staleness))
    for worker in turns:
        workers.turn(worker % count)
    assert workers.apart <= staleness
    pushes = [push for apply in workers.applies for push in apply.pushes]
    assert len(pushes) == len(set(pushes)), "each push is applied once"
    whole = min(workers.clocks)
    assert {(w, c) for w in range(count) for c in range(whole)} <= set(pushes)
    if staleness == 0:
        for clock, apply in enumerate(workers.applies):
            assert apply.pushes == tuple((worker, clock) for worker in range(count))


def test_a_quorum_goes_on_without_the_slowest():
    table = TableState(range(3), Consistency(quorum=2))
    table.push(0, 0)
    assert applied(table.push(2, 0)) == [Apply(((0, 0), (2, 0)), 1 / 2)]
    assert table.push(1, 0) == [Drop(1, 0)]
    assert table.num_dropped == 1
    late = TableState(range(3), Consistency(quorum=2, late="apply", aggregate="sum"))
    late.push(0, 0)
    late.push(2, 0)
    assert late.push(1, 0) == [Keep(1, 0), Apply(((1, 0),), 1.0)]


def test_nobody_waits_for_who_has_left():
    table = TableState(range(2), BSP)
    table.push(0, 0)
    table.pull(0, 1, 5)
    assert table.leave(1) == [Apply(((0, 0),), 1.0), Answer(0, 5)]
    assert table.leave(0) == []


def test_what_a_worker_left_behind_stands_for_no_other():
    table = TableState(range(3), BSP)
    table.push(2, 0)
    table.leave(2)
    assert applied(table.push(0, 0)) == []
    assert applied(table.push(1, 0)) == [Apply(((0, 0), (1, 0), (2, 0)), 1 / 3)]
    assert not table.num_dropped


def test_mistakes_are_named():
    table = TableState(range(2), BSP)
    with pytest.raises(CommError, match="worker 7 is not of this table, whose workers are 0, 1"):
        table.push(7, 0)
    with pytest.raises(CommError, match="worker 1 pushes clock 3, and its next one is 0"):
        table.push(1, 3)
    with pytest.raises(ConfigError) as raised:
        Consistency(staleness=-1, quorum=0, late="never", aggregate="max")
    for part in ("staleness must be", "a quorum is", "late must be", "aggregate must be"):
        assert part in str(raised.value)
