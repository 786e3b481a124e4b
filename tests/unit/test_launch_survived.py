"""The verdict is about the fault that ended the run, whatever deaths the run survived before."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.launch.process.job import ElasticLimits
from braid.launch.supervise.membership_state import MembershipState, Replace
from braid.launch.supervise.supervisor_state import (
    Continued,
    Exited,
    Instruction,
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
)
from braid.runtime.diagnose.block import StopReport, error_block, render_block
from braid.runtime.diagnose.tracebacks import ParsedError
from braid.runtime.diagnose.verdict import RankEnd, Verdict, exit_code, judge
from braid.runtime.rendezvous import RankLost
from survived_deaths import FIRST, STORIES, Story

S = 1_000_000_000
LIMITS = TimeLimits(5 * S, 30 * S, replaced_ns=S, interrupt_ns=20 * S, timeout_ns=1000 * S)
KILL = int(signal.SIGKILL)


def started(
    num_ranks: int, *arguments: Any, members: MembershipState | None = None
) -> SupervisorState:
    state = SupervisorState(num_ranks, LIMITS, 0, *arguments, members=members)
    for rank in range(num_ranks):
        state.handle(Started(rank), 0)
        if members is not None:
            members.started(rank)
    return state


class Play:
    """A run without processes: ranks end as they are told, or by the signals of the launcher."""

    def __init__(self, story: Story) -> None:
        self.state = started(story.num_ranks, story.expendable)
        self.ends: dict[int, RankEnd] = {}
        self.now_ns = 0

    def event(self, event: object, after_ns: int = S) -> None:
        """Let time pass, then let something happen, and obey the instructions."""
        self.now_ns += after_ns
        for instruction in self.state.handle(event, self.now_ns):
            if isinstance(instruction, SendSignal):
                for rank in instruction.ranks:
                    self.end(rank, signal=instruction.signum)

    def end(self, rank: int, error: ParsedError | None = None, **how: int) -> None:
        """End a process as `Rank.ended` and the supervisor record it."""
        facts = self.state.ranks[rank]
        if not facts.alive:
            return
        self.event(Exited(rank, "ended", ok=False), 0)
        self.ends[rank] = RankEnd(
            rank=rank,
            ended_ns=self.now_ns,
            error=error,
            asked_to_stop=facts.signalled and facts.failed_ns is None,
            declared_dead=facts.declared_dead,
            stopped_s=None if facts.stopped_ns is None else (self.now_ns - facts.stopped_ns) / 1e9,
            survived=facts.survived,
            **how,
        )

    def fail(self, rank: int, how: str) -> None:
        """Let a rank fail in one of the ways of `FIRST` and `LATER`."""
        self.now_ns += S
        if how == "kill":
            self.end(rank, signal=KILL)
        elif how == "exit":
            self.end(rank, exit_code=3)
        elif how == "stop":
            self.event(Stopped(rank, int(signal.SIGSTOP)))
            self.event(Tick(), LIMITS.stopped_ns)
        elif how == "raise":
            self.event(ReportedFailure(rank, "raised ValueError"))
            self.end(rank, ParsedError(type="ValueError", message="x"), exit_code=1)
        elif how == "timeout":
            self.event(Tick(), LIMITS.timeout_ns)
        else:
            self.event(Interrupted(int(signal.SIGTERM)))

    def finish(self) -> Verdict:
        """Let the others end, and return the verdict."""
        while self.state.phase is not RunPhase.DONE:
            self.event(Tick(), LIMITS.interrupt_ns)
        return judge(self.ends.values(), stopped_by=self.state.stopped_by)

    def told(self, verdict: Verdict) -> tuple[str, list[int], bool, int]:
        """Return what a user is told of the end."""
        causes = [end.rank for end in verdict.cause]
        return verdict.kind, causes, verdict.certain, exit_code(verdict, self.state.signum)


@pytest.mark.parametrize("story", STORIES, ids="-".join)
def test_after_a_survived_death_the_later_fault_is_the_cause(story):
    play = Play(story)
    play.fail(story.victim, story.first)
    assert (play.state.phase, play.state.fault_ns) == (RunPhase.RUNNING, None)
    play.fail(story.culprit, story.later)
    verdict = play.finish()
    assert play.told(verdict) == story.verdict
    assert [end.rank for end in verdict.survived] == [story.victim]
    assert story.victim not in [end.rank for end in verdict.affected]


STOP = int(signal.SIGSTOP)


def _elastic(num_ranks: int, min_ranks: int, *, has_trained: bool = True) -> SupervisorState:
    members = MembershipState(ElasticLimits(min_ranks=min_ranks, restarts=0), num_ranks)
    state = started(num_ranks, members=members)
    for rank in range(num_ranks):
        members.ready(rank, -1, -1)
    if has_trained:
        members.trained(0)
    return state


def _killed(instructions: Sequence[Instruction]) -> list[int]:
    return [rank for i in instructions if isinstance(i, SendSignal) for rank in i.ranks]


def test_members_wait_for_a_stopped_rank_as_long_as_its_replacement_takes():
    state = _elastic(3, min_ranks=2)
    half_ns = LIMITS.replaced_ns // 2
    for start_ns, limit_ns in ((S, LIMITS.replaced_ns), (3 * S, half_ns)):
        (warning,) = state.handle(Stopped(1, STOP), start_ns)
        assert (state.deadline_ns, warning.limit_s) == (start_ns + limit_ns, limit_ns / S)
        out = state.handle(Tick(), start_ns + half_ns)
        state.handle(Continued(1), start_ns + half_ns)
    assert _killed(out) == [1]
    assert out[0] == SendToRank(RankLost(1, "was stopped by SIGSTOP for 1 s"))
    assert (state.ranks[1].declared_dead, state.ranks[1].survived) == (True, True)


def test_stops_of_long_ago_do_not_count():
    state = _elastic(3, min_ranks=2)
    for start_ns in (S, 2 * S + LIMITS.stopped_ns):
        state.handle(Stopped(1, STOP), start_ns)
        assert state.deadline_ns == start_ns + LIMITS.replaced_ns
        state.handle(Continued(1), start_ns + S // 2)


@pytest.mark.parametrize(
    ("min_ranks", "stopped", "has_trained"),
    [(3, (1,), True), (1, (0, 1, 2), True), (1, (1,), False)],
    ids=["too few are left", "no member runs", "the state may be missing elsewhere"],
)
def test_a_stopped_rank_that_cannot_be_replaced_is_waited_for(min_ranks, stopped, has_trained):
    state = _elastic(3, min_ranks, has_trained=has_trained)
    for rank in stopped:
        state.handle(Stopped(rank, STOP), S)
    assert state.deadline_ns == S + LIMITS.stopped_ns
    assert state.handle(Tick(), LIMITS.stopped_ns) == []


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["stop", "go on", "wait"]), st.integers(0, S)),
    max_size=30,
)


@given(EVENTS)
def test_a_rank_is_killed_only_if_a_running_member_has_waited_for_it(events):
    state = _elastic(3, min_ranks=1)
    stopped: set[int] = set()
    waited_ns = dict.fromkeys(range(3), 0)
    now_ns = 0
    for rank, kind, after_ns in events:
        alive = {r for r in range(3) if not state.ranks[r].declared_dead}
        for waiting in stopped if alive - stopped else ():
            waited_ns[waiting] += after_ns
        now_ns += after_ns
        event = Tick()
        if kind == "stop" and rank in alive - stopped:
            event = Stopped(rank, STOP)
        elif kind == "go on" and rank in stopped:
            event = Continued(rank)
        killed = _killed(state.handle(event, now_ns))
        stopped ^= {rank} if isinstance(event, Stopped | Continued) else set()
        assert all(waited_ns[r] >= LIMITS.replaced_ns for r in killed)
        overdue = (
            {r for r in stopped if waited_ns[r] >= LIMITS.replaced_ns} if alive - stopped else set()
        )
        assert overdue - set(killed) == set()
        stopped -= set(killed)


def test_a_fault_before_a_given_up_rank_is_reaped_is_a_later_one():
    state = started(2, frozenset({1}))
    state.handle(Stopped(1, int(signal.SIGSTOP)), S)
    state.handle(Tick(), S + LIMITS.stopped_ns)
    state.handle(Interrupted(int(signal.SIGTERM)), S + LIMITS.stopped_ns)
    state.handle(Exited(1, "ended", ok=False), S + LIMITS.stopped_ns)
    assert (state.ranks[1].survived, state.stopped_by) == (True, "interrupted")


def test_a_run_does_not_survive_the_last_one_of_a_needed_set():
    state = started(4, frozenset({1, 2, 3}), (frozenset({1}), frozenset({2, 3})))
    state.handle(Exited(2, "was killed", ok=False), S)
    assert (state.ranks[2].survived, state.phase) == (True, RunPhase.RUNNING)
    state.handle(Exited(3, "was killed", ok=False), 2 * S)
    assert (state.ranks[3].survived, state.phase) == (False, RunPhase.GRACE)


def test_a_rank_that_finished_is_enough_of_a_needed_set():
    state = started(3, frozenset({1, 2}), (frozenset({1, 2}),))
    state.handle(Exited(1, "exited with code 0", ok=True), S)
    state.handle(Exited(2, "was killed", ok=False), 2 * S)
    assert (state.ranks[2].survived, state.phase) == (True, RunPhase.RUNNING)


def test_a_replaced_rank_counts_for_its_role():
    members = MembershipState(ElasticLimits(min_ranks=1, restarts=2), 3)
    sets = (frozenset({1}), frozenset({2}))
    state = started(3, frozenset({1, 2}), sets, members=members)
    for lost, successor in ((1, 3), (3, 4)):
        state.handle(Exited(lost, "was killed", ok=False), S)
        assert (state.ranks[lost].survived, members.lost(lost)) == (True, [Replace()])
        state.handle(Started(successor, place=1), S)
        members.started(successor)
    state.handle(Exited(2, "exited with code 0", ok=True), S)
    state.handle(Exited(4, "was killed", ok=False), S)
    assert members.restarts_left == 0
    assert (state.ranks[4].survived, state.phase) == (False, RunPhase.GRACE)


def test_a_rank_that_is_not_expendable_is_not_replaced():
    members = MembershipState(ElasticLimits(min_ranks=1, restarts=2), 2)
    state = started(2, frozenset({1}), members=members)
    state.handle(Exited(0, "was killed", ok=False), S)
    assert (state.ranks[0].survived, state.phase) == (False, RunPhase.GRACE)


@given(st.data(), st.sampled_from(STORIES))
def test_survived_deaths_change_nothing_of_the_verdict(data, story):
    play = Play(story)
    victims = data.draw(st.permutations(sorted(story.expendable)))
    victims = victims[: data.draw(st.integers(0, len(victims)))]
    for victim in victims:
        play.fail(victim, data.draw(st.sampled_from(FIRST)))
    play.fail(story.culprit, story.later)
    verdict = play.finish()
    assert play.told(verdict) == story.verdict
    assert [end.rank for end in verdict.survived] == victims


LOST = "rank 1 was killed by signal 9 (SIGKILL)"
UNUSABLE = f"group of ranks [0, 1, 4] cannot be used: it was aborted here: rank 4: {LOST}"


@pytest.mark.parametrize(
    "error",
    [
        ParsedError(type="PeerLostError", message=LOST),
        ParsedError(
            type="HorovodInternalError",
            module="braid.compat.horovod.common.exceptions",
            message=UNUSABLE,
            chain=(f"StaleError: {UNUSABLE}",),
        ),
        ParsedError(type="CommError", message=f"stopped because {LOST}, and no change follows"),
    ],
)
def test_a_death_that_ends_the_run_after_all_is_the_cause(error):
    killed = RankEnd(rank=1, pid=101, ended_ns=1, signal=KILL, survived=True)
    worker = RankEnd(rank=4, pid=104, ended_ns=9 * S, exit_code=1, error=error)
    verdict = judge([killed, worker])
    assert (verdict.kind, verdict.cause, verdict.certain) == ("signal", (killed,), True)
    assert (verdict.affected, verdict.survived, exit_code(verdict, 0)) == ((worker,), (), 137)


def test_a_survived_death_that_no_error_names_is_not_blamed():
    killed = RankEnd(rank=1, ended_ns=1, signal=KILL, survived=True)
    late = ParsedError(type="CommTimeout", message="no progress for 300 s")
    worker = RankEnd(rank=4, ended_ns=9 * S, exit_code=1, error=late)
    verdict = judge([killed, worker])
    assert (verdict.cause, verdict.certain, verdict.survived) == ((worker,), False, (killed,))


def test_the_last_of_several_deaths_is_suspected_if_errors_follow_at_once():
    first, last = (
        RankEnd(rank=rank, ended_ns=rank * 100 * S, signal=KILL, survived=True) for rank in (1, 2)
    )
    lost = ParsedError(type="PeerLostError", message="lost server 1: no server has a copy")
    scheduler = RankEnd(rank=0, ended_ns=201 * S, exit_code=1, error=lost)
    verdict = judge([first, last, scheduler])
    assert (verdict.cause, verdict.certain, verdict.survived) == ((last,), False, (first,))


def test_the_block_lists_survived_deaths_by_time():
    ends = [
        RankEnd(rank=0, pid=100, ended_ns=9 * S, exit_code=3),
        RankEnd(
            rank=1, pid=101, ended_ns=4 * S, signal=KILL, last_events="in serve", survived=True
        ),
        RankEnd(rank=2, pid=102, ended_ns=2 * S, exit_code=3, survived=True),
        RankEnd(rank=3, pid=103, ended_ns=9 * S, signal=15, asked_to_stop=True),
    ]
    report = StopReport(verdict=judge(ends), exit_code=3, elapsed_s=9.0)
    assert render_block(error_block(report)) == (
        "braid: run stopped after 9.0 s (exit 3)\n"
        "  cause    rank 0 (pid 100): exited with code 3\n"
        "  survived rank 2 (pid 102), 7.0 s before: exited with code 3\n"
        "           rank 1 (pid 101), 5.0 s before: killed by signal 9 (SIGKILL) in serve\n"
        "  affected rank 3 ended by braid (SIGTERM)"
    )
