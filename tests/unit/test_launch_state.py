"""Claims of the launcher's pure parts: decisions, output, commands, memory counters."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.launch.supervise.supervisor_state import (
    STACKS_NS,
    TERMINATE_NS,
    CollectStacks,
    Continued,
    Exited,
    Interrupted,
    ReportedFailure,
    RunPhase,
    SendSignal,
    SendToRank,
    Started,
    Stopped,
    SupervisorState,
    Tick,
    TimeLimits,
    Warn,
)
from braid.runtime.rendezvous import RankLost, Stop

S = 1_000_000_000
LIMITS = TimeLimits(5 * S, 30 * S, replaced_ns=S, interrupt_ns=20 * S, timeout_ns=100 * S)
TERM, KILL, INT, STOP = (
    int(s) for s in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGSTOP)
)


def started(num_ranks: int, *arguments: Any) -> SupervisorState:
    state = SupervisorState(num_ranks, LIMITS, 0, *arguments)
    for rank in range(num_ranks):
        state.handle(Started(rank), 0)
    return state


@pytest.fixture
def three() -> SupervisorState:
    return started(3)


def exited(rank: int, ok: bool = False) -> Exited:
    return Exited(rank, "exited with code 0" if ok else "exited with code 3", ok)


def test_a_run_whose_ranks_all_finish_needs_nothing(three):
    told = [three.handle(exited(rank, ok=True), S) for rank in range(3)]
    assert told == [
        [SendToRank(RankLost(r, "exited with code 0", departed=True))] for r in range(3)
    ]
    assert (three.phase, three.stopped_by, three.fault_ns) == (RunPhase.DONE, "", None)


def test_the_others_go_on_without_an_expendable_rank_until_another_fails():
    state = started(3, frozenset({1}))
    lost = SendToRank(RankLost(1, "exited with code 3", departed=False))
    assert state.handle(exited(1), S) == [lost, Warn(1, 0, "exited with code 3")]
    assert (state.phase, state.fault_ns) == (RunPhase.RUNNING, None)
    state.handle(exited(2), 2 * S)
    assert (state.phase, state.fault_ns) == (RunPhase.GRACE, 2 * S)


def test_an_exception_of_an_expendable_rank_fails_the_run():
    state = started(2, frozenset({1}))
    state.handle(ReportedFailure(1, "raised KeyError"), S)
    assert state.phase is RunPhase.GRACE


def test_a_failure_is_told_at_once_then_grace_then_sigterm_then_sigkill(three):
    steps = [
        three.handle(exited(1), S),
        three.handle(Tick(), 6 * S - 1),
        three.handle(Tick(), 6 * S),
        three.handle(Tick(), 6 * S + TERMINATE_NS),
    ]
    assert steps == [
        [SendToRank(RankLost(1, "exited with code 3"))],
        [],
        [SendSignal((0, 2), TERM)],
        [SendSignal((0, 2), KILL)],
    ]
    three.handle(exited(0), 9 * S)
    assert three.phase is RunPhase.KILLING
    three.handle(exited(2), 9 * S)
    assert three.phase is RunPhase.DONE


def test_no_rank_is_started_after_a_failure():
    state = SupervisorState(3, LIMITS, 0)
    state.handle(Started(0), 0)
    before = state.starting
    state.handle(exited(0), 1)
    assert (before, state.starting, state.phase) == (True, False, RunPhase.DONE)


def test_a_rank_that_says_it_failed_is_told_once(three):
    first = three.handle(ReportedFailure(2, "raised ValueError: x"), S)
    then = three.handle(exited(2), 2 * S)
    assert (first, then) == ([SendToRank(RankLost(2, "raised ValueError: x"))], [])
    assert (three.phase, three.ranks[2].failed_ns) == (RunPhase.GRACE, S)


def test_what_a_signalled_rank_says_is_no_failure(three):
    three.handle(Interrupted(TERM), S)
    assert three.handle(ReportedFailure(0, "raised KeyboardInterrupt: "), 2 * S) == []
    assert three.ranks[0].failed_ns is None


def test_a_stop_is_a_warning_and_a_continue_clears_it(three):
    assert three.handle(Stopped(1, STOP), S) == [Warn(1, STOP, limit_s=30)]
    assert three.deadline_ns == 31 * S
    assert three.handle(Continued(1), 2 * S) == [Warn(1, 0)]
    assert three.handle(Tick(), 50 * S) == []


def test_the_longest_stop_of_a_rank_is_kept(three):
    for start, end in ((1, 4), (10, 12)):
        three.handle(Stopped(2, STOP), start * S)
        three.handle(Continued(2), end * S)
    assert (three.ranks[2].paused_ns, three.ranks[2].stopped_ns) == (3 * S, None)


def test_a_rank_stopped_for_its_limit_is_declared_dead(three):
    three.handle(Stopped(1, STOP), S)
    assert three.handle(Tick(), 31 * S) == [
        SendToRank(RankLost(1, "was stopped by SIGSTOP for 30 s")),
        SendSignal((1,), KILL),
    ]
    assert three.handle(exited(1), 31 * S) == []
    assert (three.ranks[1].declared_dead, three.phase) == (True, RunPhase.GRACE)


def test_at_the_end_a_stopped_rank_is_killed_right_away(three):
    three.handle(Stopped(1, STOP), S)
    three.handle(exited(0), 2 * S)
    assert three.handle(Tick(), 7 * S) == [SendSignal((2,), TERM), SendSignal((1,), KILL)]


def test_nobody_waits_for_the_grace_of_stopped_ranks_alone(three):
    three.handle(Stopped(1, STOP), S)
    three.handle(exited(0), 2 * S)
    assert three.handle(exited(2), 3 * S) == [
        SendToRank(RankLost(2, "exited with code 3")),
        SendSignal((1,), KILL),
    ]


def test_a_signal_is_forwarded_once_and_the_second_kills(three):
    first = three.handle(Interrupted(INT), S)
    second = three.handle(Interrupted(INT), 2 * S)
    assert first == [SendToRank(Stop("SIGINT")), SendSignal((0, 1, 2), INT)]
    assert second == [SendSignal((0, 1, 2), KILL)]
    assert (three.stopped_by, three.signum) == ("interrupted", INT)


def test_interrupted_ranks_have_their_time_to_save(three):
    three.handle(Interrupted(TERM), S)
    early = three.handle(exited(0), 2 * S)
    late = three.handle(Tick(), 21 * S)
    assert (early, late) == (
        [SendToRank(RankLost(0, "exited with code 3"))],
        [SendSignal((1, 2), TERM)],
    )


def test_an_interrupt_during_the_start_starts_no_more():
    state = SupervisorState(3, LIMITS, 0)
    state.handle(Interrupted(INT), 0)
    assert (state.starting, state.phase) == (False, RunPhase.DONE)


def test_a_signal_after_a_failure_does_not_hide_it(three):
    three.handle(exited(0), S)
    assert three.handle(Interrupted(INT), 2 * S) == [SendSignal((1, 2), TERM)]
    assert three.stopped_by == ""


def test_the_time_limit_collects_stacks_before_it_stops(three):
    assert three.handle(Tick(), 100 * S) == [
        CollectStacks(),
        SendToRank(Stop("the run's time limit")),
    ]
    assert three.handle(Tick(), 100 * S + STACKS_NS) == [SendSignal((0, 1, 2), TERM)]
    assert three.stopped_by == "timeout"


EVENTS = st.one_of(
    st.builds(Exited, st.integers(0, 2), st.just("x"), st.booleans()),
    st.builds(ReportedFailure, st.integers(0, 2), st.just("x")),
    st.builds(Stopped, st.integers(0, 2), st.just(STOP)),
    st.builds(Continued, st.integers(0, 2)),
    st.builds(Interrupted, st.sampled_from([INT, TERM])),
    st.just(Tick()),
)


@given(st.lists(st.tuples(EVENTS, st.integers(0, 40 * S)), max_size=20))
def test_whatever_happens_every_rank_is_killed_or_ends_within_the_limits(story):
    state, now, killed = started(3), 0, set()

    def handle(event: object) -> None:
        for instruction in state.handle(event, now):
            if isinstance(instruction, SendSignal):
                assert all(state.ranks[rank].alive for rank in instruction.ranks)
                if instruction.signum == KILL:
                    killed.update(instruction.ranks)

    for event, pause in story:
        now += pause
        if getattr(event, "rank", None) is None or state.ranks[event.rank].alive:
            handle(event)
    while state.deadline_ns is not None:
        now = max(now, state.deadline_ns)
        handle(Tick())
    assert {rank for rank, facts in state.ranks.items() if facts.alive} <= killed
