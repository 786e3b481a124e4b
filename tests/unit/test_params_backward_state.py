"""The states of a backward, and what follows its end."""

from __future__ import annotations

import pytest

from braid.errors import ConfigError
from braid.parallel.gradients.backward_state import (
    ACTIONS,
    BackwardEnd,
    BackwardPhase,
    BackwardState,
    ReducerAction,
)
from braid.parallel.gradients.bucket_layout import BucketLayout
from braid.parallel.gradients.reducer_options import ReducerOptions
from braid.parallel.gradients.reducer_policy import ReducerPolicy
from braid.parallel.gradients.status import RankState, Status


def state_in(phase: BackwardPhase, *, has_gradient: bool = True) -> BackwardState:
    state = BackwardState()
    state.begin(phase)
    state.has_gradient = has_gradient
    return state


@pytest.mark.parametrize(("phase", "event"), ACTIONS)
def test_each_end_of_a_backward_leads_to_idle_and_its_action(phase, event):
    state = state_in(phase)
    action = state.end(event)
    assert (action, state.phase) == (ACTIONS[phase, event], BackwardPhase.IDLE)
    counts = action in {ReducerAction.ACCUMULATE, ReducerAction.REPORT_LATER}
    assert state.num_accumulated == counts
    assert state.failed == (action is ReducerAction.REPORT_LATER)


def test_every_phase_but_idle_has_an_action_for_every_event():
    assert set(ACTIONS) == {
        (p, e) for p in BackwardPhase for e in BackwardEnd if p is not BackwardPhase.IDLE
    }


def test_a_backward_without_gradients_leads_to_nothing():
    state = state_in(BackwardPhase.AVERAGING, has_gradient=False)
    assert state.end(BackwardEnd.END) is ReducerAction.NOTHING
    assert state.num_accumulated == 0


def test_weights_of_backwards_add_up_until_the_average():
    state = BackwardState()
    for weight in (2.0, 3.0):
        state.begin(BackwardPhase.LOCAL)
        state.has_gradient = True
        state.add_weight(weight)
        state.add_weight(weight)
        state.end(BackwardEnd.END)
    assert (state.loss_weight, state.num_accumulated) == (5.0, 2)
    state.averaged()
    assert (state.loss_weight, state.num_accumulated, state.is_weighted) == (1.0, 0, False)


def test_a_backward_of_two_weights_is_refused():
    state = state_in(BackwardPhase.LOCAL)
    state.add_weight(2.0)
    with pytest.raises(ConfigError, match=r"loss weights, 2\.0 and None"):
        state.add_weight(None)


# Decisions.


def test_every_kth_backward_averages_and_any_that_is_asked_to():
    policy = ReducerPolicy(ReducerOptions(gradient_accumulation_steps=3))
    state, phases = BackwardState(), []
    for _ in range(3):
        phases.append(policy.next_phase(state, synchronizes=True))
        state.num_accumulated += 1
    assert phases == [BackwardPhase.LOCAL, BackwardPhase.LOCAL, BackwardPhase.AVERAGING]
    assert policy.next_phase(state, synchronizes=False) is BackwardPhase.LOCAL
    early = BackwardState(averages_next=True)
    assert policy.next_phase(early, synchronizes=True) is BackwardPhase.AVERAGING


@pytest.mark.parametrize(
    ("static_graph", "delayed", "is_learnt", "expected"),
    [
        (False, False, False, True),
        (True, False, False, False),
        (True, False, True, True),
        (False, True, True, False),
    ],
)
def test_buckets_are_launched_early_unless_they_wait_for_something(
    static_graph, delayed, is_learnt, expected
):
    policy = ReducerPolicy(ReducerOptions(static_graph=static_graph))
    layout = BucketLayout("float32", (0,), delayed)
    assert policy.launches_early(layout, is_learnt=is_learnt) is expected


def status(present, states, weight=2.0):
    return Status(present, [0, 0], [2, 2], states, [0, 0], [0, 0], weight, 0, 0)


def test_a_bucket_is_needed_if_a_rank_has_a_gradient_or_has_failed():
    policy = ReducerPolicy(ReducerOptions())
    active = [RankState.ACTIVE] * 2
    first, second = BucketLayout("float32", (0,)), BucketLayout("float32", (1,))
    only_second = status([0, 1], active)
    assert [policy.is_needed(each, only_second) for each in (first, second)] == [False, True]
    assert policy.is_needed(first, status([0, 0], [RankState.ACTIVE, RankState.FAILED]))


def test_a_failure_is_reported_before_numbers_that_are_not_finite():
    policy = ReducerPolicy(ReducerOptions())
    states = [
        policy.rank_state(BackwardState(failed=failed), is_finite=finite)
        for failed in (False, True)
        for finite in (True, False)
    ]
    assert states == [
        RankState.ACTIVE,
        RankState.NONFINITE,
        RankState.FAILED,
        RankState.FAILED,
    ]


@pytest.mark.parametrize(("weight", "mean"), [(2.0, 1.0), (6.0, 3.0), (0.0, 1.0)])
def test_averages_are_divided_by_the_mean_weight(weight, mean):
    policy = ReducerPolicy(ReducerOptions())
    assert policy.mean_weight(status([1, 1], [RankState.ACTIVE] * 2, weight)) == mean
