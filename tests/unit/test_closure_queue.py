"""The coordinator's queue gives each closure to one worker, whatever workers come, go and fail."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from braid.strategies.coordinator.queue_state import (
    Assign,
    CancelClosure,
    ClosureQueue,
    EndClosure,
)


def test_what_a_lost_worker_had_runs_first_on_another():
    queue = ClosureQueue(8)
    assert queue.schedule(0) == []
    assert queue.ready("worker:0") == [Assign(0, "worker:0")]
    assert queue.schedule(1) == []
    assert queue.lost("worker:0") == []
    assert queue.ready("worker:1") == [Assign(0, "worker:1")]
    assert queue.finished(0, "worker:1") == [EndClosure(0), Assign(1, "worker:1")]
    assert not queue.is_done
    assert queue.finished(1, "worker:1") == [EndClosure(1)]
    assert queue.is_done


def test_of_a_closure_that_ran_twice_the_first_end_counts():
    queue = ClosureQueue(8)
    queue.ready("worker:0")
    queue.schedule(0)
    queue.lost("worker:0")
    queue.ready("worker:1")
    assert queue.finished(0, "worker:0") == [EndClosure(0)], "the link was broken, not the worker"
    assert queue.finished(0, "worker:1") == []


def test_an_error_cancels_what_waits_and_what_runs_and_shows_once():
    queue = ClosureQueue(8)
    queue.ready("worker:0")
    queue.ready("worker:1")
    for number in range(4):
        queue.schedule(number)
    assert queue.finished(1, "worker:1", failed=True) == [
        EndClosure(1),
        CancelClosure(2),
        CancelClosure(3),
    ]
    assert queue.take_failure() is None, "closure 0 still runs"
    assert queue.finished(0, "worker:0") == [CancelClosure(0)]
    assert queue.take_failure() == 1
    assert queue.take_failure() is None
    assert queue.schedule(4) == [Assign(4, "worker:0")]


def test_each_process_of_a_worker_makes_its_resources_before_anything_else():
    queue = ClosureQueue(8)
    queue.ready("worker:0")
    assert queue.add_resource(-1) == [Assign(-1, "worker:0")]
    assert queue.schedule(0) == []
    assert queue.finished(-1, "worker:0") == [EndClosure(-1), Assign(0, "worker:0")]
    assert queue.ready("worker:0") == [Assign(-1, "worker:0")], "another process"
    assert queue.oldest == 0
    assert queue.finished(-1, "worker:0") == [EndClosure(-1), Assign(0, "worker:0")]


def test_workers_of_a_synchronous_strategy_run_closures_in_turns():
    queue = ClosureQueue(8, ["worker:0", "worker:1"])
    assert queue.ready("worker:0") == []
    assert queue.schedule(0) == [Assign(0, "worker:0")]
    assert queue.finished(0, "worker:0") == [EndClosure(0)]
    assert queue.num_incomplete == 1
    assert queue.schedule(1) == [], "worker 1 is next"
    assert queue.ask(-1) == [Assign(-1, "worker:0")], "a question is in no turn"
    assert queue.ready("worker:1") == [Assign(1, "worker:1")]
    assert queue.num_incomplete == 0
    queue.lost("worker:1")
    assert queue.ready("worker:1") == [Assign(1, "worker:1")], "its next process has its turn"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["schedule", "ready", "lost", "over", "fail", "take"]), st.integers(0, 2)
    ),
    max_size=60,
)


@given(EVENTS, st.integers(1, 3))
def test_no_closure_is_lost_or_ends_twice(events, window):
    queue = ClosureQueue(100)
    queue.window = window
    queue.add_resource(-1)
    scheduled, ended = 0, list[int]()
    instructions = []

    def act(done):
        instructions.extend(done)
        ended.extend(
            each.number for each in done if not isinstance(each, Assign) if each.number >= 0
        )
        for each in done:
            if isinstance(each, Assign):
                assert each.worker in queue.workers

    for event, number in events:
        worker = f"worker:{number}"
        match event:
            case "schedule":
                scheduled += 1
                act(queue.schedule(scheduled - 1))
            case "ready":
                act(queue.ready(worker))
            case "lost":
                act(queue.lost(worker))
            case "take":
                queue.take_failure()
            case _ if queue.running.get(worker):
                first = queue.running[worker][0]
                act(queue.finished(first, worker, failed=event == "fail" and first >= 0))
    act(queue.ready("worker:9"))
    for _ in range(1000):
        for worker, running in queue.running.items():
            act(queue.finished(running[0], worker))
    assert sorted(ended) == list(range(scheduled))
    assert queue.is_done
