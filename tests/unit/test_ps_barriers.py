"""Barriers of the scheduler when workers are lost: nobody waits for one that will not come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.ps.protocol.members_state import ReleaseNodes
from braid.ps.protocol.scheduler_state import SchedulerState

BEFORE, AFTER = "before a snapshot", "after a snapshot"
MEMBERS = frozenset({"worker:0", "worker:1", "worker:2"})


class Scheduled:
    """A scheduler of three workers, and who waits at its barriers."""

    def __init__(self, policy: str) -> None:
        self.state = SchedulerState(1, 3, on_worker_loss=policy)
        self.state.server_joins(0, "address")
        for worker in range(3):
            self.state.worker_joins(worker)
        self.state.spare_joins(7)
        self.waiting: set[int] = set()

    def obey(self, instructions):
        for each in instructions:
            if isinstance(each, ReleaseNodes):
                self.waiting -= {int(node.partition(":")[2]) for node, _ in each.requests}

    def come(self, worker: int, name: str, step: int = -1) -> None:
        self.waiting.add(worker)
        self.obey(self.state.barrier(name, f"worker:{worker}", 1, MEMBERS, step))

    def lose(self, worker: int) -> None:
        self.waiting.discard(worker)
        self.obey(self.state.worker_lost(worker, "killed"))
        self.obey(self.state.worker_joins(worker, life=1))  # its successor


@pytest.mark.parametrize("policy", ["replace", "wait", "shrink"])
def test_when_the_saver_dies_inside_save_the_others_go_on(policy):
    run = Scheduled(policy)
    for worker in range(3):
        run.come(worker, BEFORE, 10)
    run.come(1, AFTER, 10)
    run.lose(0)
    assert run.waiting == {1}
    run.come(2, AFTER, 10)
    assert run.waiting == set()


@pytest.mark.parametrize("policy", ["replace", "wait"])
def test_a_successor_that_repeats_a_saved_step_passes_and_then_is_waited_for(policy):
    run = Scheduled(policy)
    run.lose(0)
    for name in (BEFORE, AFTER):
        run.come(1, name, 10)
        run.come(2, name, 10)
    for name in (BEFORE, AFTER):
        run.come(0, name, 10)
        assert run.waiting == set()
    run.come(0, BEFORE, 20)
    run.come(1, BEFORE, 20)
    assert run.waiting == {0, 1}
    run.come(2, BEFORE, 20)
    assert run.waiting == set()


def test_a_barrier_of_the_program_waits_for_the_successor_which_repeats_it():
    run = Scheduled("replace")
    run.come(1, "epoch")
    run.come(2, "epoch")
    run.lose(0)
    assert run.waiting == {1, 2}
    run.come(0, "epoch")
    assert run.waiting == set()


@given(st.data())
def test_saves_of_all_workers_end_whenever_one_of_them_dies(data):
    """Whoever dies wherever, its successor repeats steps from any one on, and nobody is stuck."""
    run = Scheduled("replace")
    calls = [(name, step) for step in (10, 20, 30) for name in (BEFORE, AFTER)]
    left = {worker: list(calls) for worker in range(3)}
    victim = data.draw(st.integers(0, 2))
    dies_at = data.draw(st.integers(0, 12))
    moves = 0
    while any(left.values()) or run.waiting:
        able = [worker for worker in range(3) if left[worker] and worker not in run.waiting]
        assert able, (run.waiting, left)
        worker = data.draw(st.sampled_from(able))
        run.come(worker, *left[worker].pop(0))
        moves += 1
        if moves == dies_at:
            run.lose(victim)
            num_done = 6 - len(left[victim])
            first = min(6, num_done + num_done % 2)  # the step of its next save, or the one before
            first = data.draw(st.sampled_from([max(0, first - 2), first]))
            left[victim] = calls[first:]
