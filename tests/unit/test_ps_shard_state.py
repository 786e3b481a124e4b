"""A shard's head says who waits for whom, and decides once."""

from __future__ import annotations

import math

import pytest

from braid.errors import CommError
from braid.ps import BSP, Consistency
from braid.ps.protocol.instructions import (
    Accept,
    AnswerPull,
    Apply,
    DropPushes,
    Keep,
    Merge,
    Moved,
    View,
)
from braid.ps.protocol.progress import ConsistencySchedule, ShardProgress, ShardRecord
from braid.ps.protocol.shard_state import ShardState, TaskKey


def head(workers: int, chain: tuple[int, ...] = (0,)) -> ShardState:
    state = ShardState(0, BSP)
    state.configure(View(0, chain, {}, dict.fromkeys(range(workers), 0)))
    return state


def test_a_clock_is_one_record_in_the_order_of_workers():
    state = head(2)
    assert state.push(1, 0, ("worker:1", 1)) == [Keep(1, 0)]
    assert state.pull(1, 1, ("worker:1", 2)) == []
    record = ShardRecord(number=1, pushes=((0, 0), (1, 0)), scale=0.5, completed=1)
    assert state.push(0, 0, ("worker:0", 1)) == [
        Keep(0, 0),
        Merge(record),
        Apply(record),
        Accept(("worker:0", 1)),
        Accept(("worker:1", 1)),
        AnswerPull(("worker:1", 2)),
    ]
    assert state.push(0, 0, ("worker:0", 9)) == [Accept(("worker:0", 9))]


def test_pushes_of_one_step_with_different_rates_are_refused():
    state = head(2)
    state.push(0, 0, ("worker:0", 1), lr=0.1)
    state.push(0, 0, ("worker:0", 1), lr=0.1)  # sent again
    with pytest.raises(CommError, match=r"rate 0\.2, but worker 0 with 0\.1"):
        state.push(1, 0, ("worker:1", 1), lr=0.2)
    (_, merged, *_) = state.push(1, 0, ("worker:1", 2), lr=0.1)
    assert merged.record.step_lr == 0.1
    state.push(0, 1, ("worker:0", 2), lr=0.3)  # another step may have another rate
    state.push(1, 1, ("worker:1", 3))  # without rows, as of an embedding that was not used


def test_who_has_pushed_is_not_named_as_missing():
    state = head(3)
    state.push(0, 0, ("worker:0", 1))
    state.push(2, 0, ("worker:2", 1))
    state.pull(0, 1, ("worker:0", 2))
    assert state.waiting() == ["worker 0 waits at clock 1 for pushes from 1 (at clock 0)"]


def test_a_worker_that_left_stands_for_no_other():
    state = head(3)
    state.push(2, 0, ("worker:2", 1))
    assert state.configure(View(1, (0,), {}, {0: 0, 1: 0})) == []
    assert state.push(0, 0, ("worker:0", 1)) == [Keep(0, 0)]
    done = state.push(1, 0, ("worker:1", 1))
    assert done[1] == Merge(
        ShardRecord(number=1, pushes=((0, 0), (1, 0), (2, 0)), scale=1 / 3, completed=1)
    )


def test_a_head_with_a_successor_applies_what_is_confirmed_in_its_epoch():
    state = head(1, (0, 1))
    done = state.push(0, 0, ("worker:0", 1))
    assert not any(isinstance(each, Apply | Accept) for each in done)
    assert state.confirm(1, 9) == []
    record = state.log[1]
    assert state.confirm(1, 0) == [Apply(record), Accept(("worker:0", 1))]


def test_who_leaves_the_chain_sends_all_to_the_new_head():
    state = head(2, (0, 1))
    state.push(0, 0, ("worker:0", 1))
    done = state.configure(View(1, (1,), {}, {0: 0, 1: 0}))
    assert done[-1] == DropPushes(((0, 0),))
    assert [each.request for each in done[:-1]] == [("worker:0", 1)]
    assert state.push(1, 0, ("worker:1", 1))[0].request == ("worker:1", 1)


def test_a_head_that_missed_its_removal_and_joins_again_accepts_nothing_of_before():
    state = head(1, (0, 1))
    state.push(0, 0, ("worker:0", 1))  # record 1 waits to be confirmed
    done = state.configure(View(5, (1, 0), {0: 5}, {0: 0}))
    assert done == [Moved(("worker:0", 1))]
    progress = ShardProgress(ConsistencySchedule.always(BSP), number=1)
    assert not any(isinstance(each, Accept) for each in state.install(progress, 5))
    assert state.configure(View(6, (0,), {}, {0: 0})) == []
    assert state.push(0, 0, ("worker:0", 2))[0] == Keep(0, 0)


def test_the_clock_of_a_worker_that_has_been_removed_is_known():
    state = head(2)
    for worker in range(2):
        state.push(worker, 0, (f"worker:{worker}", 1))
    state.configure(View(1, (0,), {}, {0: 0}))
    assert state.clock(1) == 1, "it may have asked before"


def test_a_rate_that_others_have_set_is_accepted_from_whoever_is_late():
    state = ShardState(0, Consistency(quorum=1))
    state.configure(View(0, (0,), {}, {0: 0, 1: 0}))
    for clock in range(100):
        state.change(clock, None, 1 / (clock + 1), ("worker:0", 2 * clock))
        state.push(0, clock, ("worker:0", 2 * clock + 1))
    assert state.change(0, None, 1.0, ("worker:1", 0)) == [Accept(("worker:1", 0))]
    with pytest.raises(
        CommError, match="settings cannot change at clock 0, because clock 100 has begun"
    ):
        state.change(0, None, 0.9, ("worker:1", 1))


def test_a_change_that_is_sent_again_is_accepted_though_a_later_one_has_come():
    state = head(2)
    for clock in range(1100):
        state.change(clock, None, 1 / (clock + 1), ("worker:0", 2 * clock))
        for worker in range(2):
            state.push(worker, clock, (f"worker:{worker}", 2 * clock + 1))
    assert state.change(1098, None, 1 / 1099, ("worker:1", 9)) == [Accept(("worker:1", 9))]
    assert len(state.applied.rates) == 1000, "old ones are forgotten"
    late = ShardRecord(number=0, pushes=((0, 1097), (1, 1098)))
    assert state.applied.rate(late) == 1 / 1098


def test_a_task_may_push_several_times_and_is_over_below_the_oldest():
    state = ShardState(0, Consistency(staleness=math.inf))
    state.configure(View(0, (0,), {}, {0: 0, 1: 0}))

    def pushed(worker: int, clock: int, *key: int) -> bool:
        done = state.push(worker, clock, (f"worker:{worker}", clock), TaskKey(*key))
        return next(each for each in done if isinstance(each, Merge)).record.pushes != ()

    assert pushed(0, 0, 5, 0)
    assert pushed(0, 1, 5, 1)
    assert not pushed(1, 0, 5, 0), "worker 1 runs the task again"
    assert not pushed(1, 1, 5, 1)
    assert pushed(1, 2, 5, 2), "which goes on where worker 0 was lost"
    assert pushed(1, 3, 9, 0, 9)
    assert state.applied.tasks == {9: 1}
    assert not pushed(0, 2, 5, 3), "the task is over"
