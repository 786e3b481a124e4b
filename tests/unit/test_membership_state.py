"""Members of an elastic run go on together, whatever dies, comes, is late or said twice."""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.launch.process.job import ElasticLimits
from braid.launch.supervise.membership_state import (
    Begin,
    Dismiss,
    GiveUp,
    MembershipState,
    Order,
    Pause,
    Replace,
)


def _begun(num_ranks: int = 3, **limits: int) -> MembershipState:
    state = MembershipState(
        ElasticLimits(**{"min_ranks": 1, "max_ranks": num_ranks, **limits}), num_ranks
    )
    for rank in range(num_ranks + limits.get("spares", 0)):
        assert state.started(rank) == []
    for rank in range(num_ranks - 1):
        assert state.ready(rank, -1, -1) == []
    every = tuple(range(num_ranks))
    assert state.ready(num_ranks - 1, -1, -1) == [Begin(0, every, (-1,) * num_ranks)]
    return state


def test_the_others_go_on_and_a_new_process_is_taken_in_after_a_step():
    state = _begun()
    assert state.can_lose(1)
    assert state.lost(1) == [Replace()]
    assert state.missing == ()
    assert state.ready(0, 0, 7) == []
    assert state.missing == (2,)
    assert state.ready(2, 0, 8) == [Begin(1, (0, 2), (7, 8))]
    assert state.started(3) == []
    assert state.ready(3, -1, -1) == [Pause((0, 2))]
    assert state.ready(2, 1, 9) == []
    assert state.ready(0, 1, 9) == [Begin(2, (0, 2, 3), (9, 9, -1))]


def test_a_spare_that_waits_is_taken_in_at_once():
    state = _begun(spares=1)
    assert state.ready(3, -1, -1) == [], "there is no room"
    assert state.lost(0) == [Replace()]
    assert state.ready(1, 0, 4) == []
    assert state.ready(2, 0, 4) == [Begin(1, (1, 2, 3), (4, 4, -1))]


def test_a_spare_waits_also_if_the_run_may_gain_slots():
    state = _begun(2, max_ranks=8, spares=1)
    assert state.ready(2, -1, -1) == []
    assert state.lost(0) == [Replace()]
    assert state.ready(1, 0, 4) == [Begin(1, (1, 2), (4, -1))]
    assert state.slots(3) == [Replace()]


def test_too_few_members_wait_for_a_new_process():
    state = _begun(2, min_ranks=2)
    assert state.lost(0) == [Replace()]
    assert state.ready(1, 0, 3) == []
    state.started(2)
    assert state.ready(2, -1, -1) == [Begin(1, (1, 2), (3, -1))]


def test_what_was_said_twice_or_late_changes_nothing():
    state = _begun(2)
    assert state.ready(0, -1, -1) == [], "before epoch 0"
    state.lost(1)
    assert state.ready(0, 0, 5) == [Begin(1, (0,), (5,))]
    assert state.ready(0, 0, 5) == []
    assert state.ready(1, 0, 5) == [], "it is gone"
    assert state.lost(1) == []


def test_the_last_one_with_the_state_cannot_be_lost():
    state = _begun(2, spares=1)
    assert state.can_lose(0)
    state.lost(0)
    assert not state.can_lose(1), "a spare has no state"


def test_a_run_ends_when_nobody_has_received_the_state():
    state = _begun(2, spares=1, restarts=0)
    state.ready(2, -1, -1)
    state.lost(1)
    assert state.ready(0, 0, 10) == [Begin(1, (0, 2), (10, -1))]
    state.lost(0)
    reason = "rank 0 was lost, the last one with the state of the training"
    assert state.ready(2, 1, -1) == [GiveUp((2,), reason)]


def test_a_run_whose_members_are_all_lost_begins_with_its_checkpoint():
    state = _begun(2, restarts=2)
    state.checkpoint_step = 100
    assert state.lost(0) == [Replace()]
    assert state.can_lose(1)
    assert state.lost(1) == [Replace()]
    assert state.started(2) == state.started(3) == []
    assert state.ready(2, -1, -1) == [], "another one is on its way"
    assert state.ready(3, -1, -1) == [Begin(1, (2, 3), (-1, -1), checkpoint_step=100)]
    assert state.lost(3) == []
    assert not state.can_lose(2), "no process would follow"


def test_a_checkpoint_does_not_replace_a_member_of_a_run_that_ends():
    state = _begun(2, restarts=2)
    state.checkpoint_step = 100
    assert state.finished(0) == []
    assert not state.can_lose(1)


def test_a_slot_that_may_come_back_does_not_replace_the_last_member():
    state = _begun(1, restarts=0, gains_slots=True)
    state.checkpoint_step = 100
    assert not state.can_lose(0)


def test_a_member_without_the_state_begins_with_the_checkpoint():
    state = _begun(2, spares=1, restarts=0)
    state.checkpoint_step = 5
    state.ready(2, -1, -1)
    state.lost(1)
    assert state.ready(0, 0, 10) == [Begin(1, (0, 2), (10, -1))]
    assert state.can_lose(0)
    assert state.lost(0) == []
    assert state.ready(2, 1, -1) == [Begin(2, (2,), (-1,), checkpoint_step=5)]
    assert not state.can_lose(2), "nothing follows it"


def test_a_run_ends_when_those_that_are_left_are_too_few():
    state = _begun(2, min_ranks=2, restarts=0)
    reason = "rank 1 was lost, and 1 of at least 2 members are left"
    assert state.lost(1) == [GiveUp((0,), reason)]
    state = _begun(1, spares=1)
    assert state.lost(0) == [GiveUp((1,), "rank 0 was lost, and 0 of at least 1 members are left")]


def test_no_more_than_the_restarts_are_started_and_fewer_than_min_end_the_run():
    state = _begun(3, min_ranks=2, restarts=1)
    assert state.lost(2) == [Replace()]
    assert state.can_lose(1), "a new process is on its way"
    state.started(3)
    assert state.lost(3) == []
    assert not state.can_lose(1)


def test_who_waits_is_dismissed_when_all_members_have_finished():
    state = _begun(2, spares=1)
    state.ready(2, -1, -1)
    assert state.finished(0) == []
    assert state.can_lose(2)
    assert state.ready(1, 0, 9) == [Begin(1, (1,), (9,))], "no newcomer at the end"
    assert state.finished(1) == [Dismiss((2,))]
    assert state.is_over
    assert state.started(3) == [Dismiss((3,))]


def test_new_slots_start_ranks_and_lost_slots_end_the_newest():
    state = _begun(2, max_ranks=4)
    assert state.slots(9) == [Replace(), Replace()]
    assert state.started(2) == state.started(3) == []
    assert state.ready(2, -1, -1) == [Pause((0, 1))]
    assert state.ready(0, 0, 5) == []
    assert state.ready(3, -1, -1) == []
    assert state.ready(1, 0, 5) == [Begin(1, (0, 1, 2, 3), (5, 5, -1, -1))]
    assert state.slots(1) == [Pause((0, 1, 2, 3))]
    for rank in (3, 2, 1):
        assert state.ready(rank, 1, 6) == []
    assert state.ready(0, 1, 6) == [Begin(2, (0,), (6,)), Dismiss((1, 2, 3))]
    assert state.lost(3) == []
    assert state.slots(2) == [Replace()]


def test_lost_slots_leave_the_least_number_of_ranks():
    state = _begun(3, min_ranks=2, max_ranks=0)
    assert state.slots(0) == [Pause((0, 1, 2))]
    assert state.ready(0, 0, 1) == state.ready(1, 0, 1) == []
    assert state.ready(2, 0, 1) == [Begin(1, (0, 1), (1, 1)), Dismiss((2,))]


def test_members_on_a_host_that_goes_away_leave_after_their_step():
    state = _begun(4, min_ranks=2)
    assert state.slots(2, {0, 1}) == [Pause((0, 1, 2, 3))]
    for rank in (0, 1, 2):
        assert state.ready(rank, 0, 5) == []
    assert state.ready(3, 0, 5) == [Begin(1, (2, 3), (5, 5)), Dismiss((0, 1))]


def test_members_on_a_host_that_goes_away_stay_until_enough_others_are_ready():
    state = _begun(3, min_ranks=2, gains_slots=True)
    assert state.slots(3, {1, 2}) == [Replace(), Replace(), Pause((0, 1, 2))]
    assert state.started(3) == state.started(4) == []
    assert state.ready(0, 0, 5) == state.ready(1, 0, 5) == []
    assert state.ready(2, 0, 5) == [Begin(1, (0, 1), (5, 5)), Dismiss((2,))], (
        "1 completes min_ranks"
    )
    assert state.ready(4, -1, -1) == [Pause((0, 1))]
    assert state.ready(3, -1, -1) == state.ready(0, 1, 6) == []
    assert state.ready(1, 1, 6) == [Begin(2, (0, 3, 4), (6, -1, -1)), Dismiss((1,))]


def test_the_state_moves_from_hosts_that_go_away_to_hosts_that_come():
    state = _begun(2, max_ranks=2)
    assert state.slots(2, {0, 1}) == [Replace(), Replace(), Pause((0, 1))]
    assert state.started(2) == state.started(3) == state.ready(2, -1, -1) == []
    assert state.ready(0, 0, 5) == state.ready(3, -1, -1) == []
    first = Begin(1, (0, 2), (5, -1))
    assert state.ready(1, 0, 5) == [first, Dismiss((1,)), Pause((0, 2))], "0 has the state"
    assert state.ready(0, 1, 6) == []
    assert state.ready(2, 1, 6) == [Begin(2, (2, 3), (6, -1)), Dismiss((0,))]


@pytest.mark.parametrize("max_ranks", [1, 3])
def test_the_state_moves_also_if_there_is_one_slot(max_ranks):
    state = _begun(1, max_ranks=max_ranks)
    assert state.slots(1, {0}) == [Replace()]
    assert state.started(1) == []
    assert state.ready(1, -1, -1) == [Pause((0,))]
    assert state.ready(0, 0, 5) == [Begin(1, (0, 1), (5, -1)), Pause((0, 1))]
    assert state.ready(0, 1, 6) == []
    assert state.ready(1, 1, 6) == [Begin(2, (1,), (6,)), Dismiss((0,))]


def test_a_process_that_waits_on_a_host_that_goes_away_is_dismissed():
    state = _begun(2, max_ranks=4)
    assert state.slots(4) == [Replace(), Replace()]
    assert state.started(2) == state.started(3) == []
    assert state.slots(2, {2, 3}) == []
    assert state.ready(2, -1, -1) == [Dismiss((2,))]
    assert state.ready(3, -1, -1) == [Dismiss((3,))]


def test_a_slot_in_which_a_rank_has_died_is_used_when_it_comes_back():
    state = _begun(2, min_ranks=2, restarts=0, gains_slots=True)
    assert state.can_lose(1)
    assert state.lost(1) == state.slots(1) == state.ready(0, 0, 3) == []
    assert state.slots(2) == [Replace()]
    assert state.started(2) == []
    assert state.ready(2, -1, -1) == [Begin(1, (0, 2), (3, -1))]


def test_a_rank_that_dies_before_the_first_epoch_is_replaced():
    state = MembershipState(ElasticLimits(min_ranks=2, max_ranks=2), 2)
    state.started(0)
    state.started(1)
    state.ready(0, -1, -1)
    assert state.lost(1) == [Replace()]
    state.started(2)
    assert state.ready(2, -1, -1) == [Begin(0, (0, 2), (-1, -1))]


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"min_ranks": 0, "max_ranks": 2}, "min_ranks must be at least 1, got 0"),
        ({"min_ranks": 3}, r"must be at least 3 \(--min-ranks\), got 2"),
        ({"min_ranks": 3, "max_ranks": 2}, "--min-ranks 3 is more than --max-ranks 2: lower"),
        (
            {"min_ranks": 1, "max_ranks": 1},
            r"must be 1 \(--min-ranks\) to 1 \(--max-ranks\), got 2",
        ),
        ({"min_ranks": 1, "max_ranks": 2, "restarts": -1}, "restarts must be at least 0, got -1"),
    ],
)
def test_limits_that_make_no_sense(limits, problem):
    with pytest.raises(ConfigError, match=problem):
        MembershipState(ElasticLimits(**limits), 2)


@dataclass
class _Process:
    epoch: int = -1
    num_steps: int = -1
    says_ready: bool = False


@dataclass
class _Run:
    """Processes, messages under way, and the orders of the launcher.

    Attributes:
        lost: Processes that have died, were cut off from the launcher, have left or were dismissed.
        finished: Processes that have ended after the last step.
        known: Processes of both kinds of which the launcher has heard.
        num_last: Number of the last step; 0 if the work does not end.
    """

    rng: random.Random
    limits: ElasticLimits
    num_ranks: int
    changes_slots: bool = False
    saves: bool = False
    num_last: int = 0
    processes: dict[int, _Process] = field(default_factory=dict)
    mail: list[tuple[str, int, int, int]] = field(default_factory=list)
    epochs: list[Begin] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    num_to_start: int = 0
    is_over: bool = False
    leaving: set[int] = field(default_factory=set)  # on hosts that go away
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.state = MembershipState(self.limits, self.num_ranks)
        self.num_to_start = self.num_ranks + self.limits.spares

    @property
    def alive(self) -> list[int]:
        return [rank for rank in self.processes if rank not in self.lost | self.finished]

    @property
    def has_finished(self) -> bool:
        """Whether the launcher knows that a member has finished."""
        return bool(self.finished & self.known)

    def execute(self, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, Begin):
                self.check(order)
                self.epochs.append(order)
                self.mail += [("begin", rank, order.epoch, 0) for rank in order.members]
            elif isinstance(order, Pause):
                self.mail += [("pause", rank, self.state.epoch, 0) for rank in order.members]
            elif isinstance(order, Replace):
                assert not self.has_finished, "no process replaces a lost one"
                self.num_to_start += 1
            elif isinstance(order, GiveUp):
                newest = max(self.processes[rank].num_steps for rank in order.members)
                assert newest < 0, "a member has the state"
                self.is_over = True
            else:
                assert self.changes_slots or self.state.is_over, "the run needs them"
                assert not set(order.ranks).intersection(self.state.members)
                self.lost.update(order.ranks)
                self.known.update(order.ranks)
                self.seen["dismissed"] += 1
                for rank in order.ranks:
                    self.send(self.rng.choice(["lost", "finished"]), rank)

    def check(self, new: Begin) -> None:
        """Check the claims in the docstring of the module for a new epoch."""
        assert new.epoch == len(self.epochs), "one history"
        assert not self.known.intersection(new.members)
        if not self.has_finished:
            most = max(self.limits.max_ranks, 2 * bool(self.leaving.intersection(new.members)))
            assert self.limits.min_ranks <= len(new.members) <= most
        if not self.epochs:
            return
        before = self.epochs[-1]
        old = {rank for begun in self.epochs for rank in begun.members}
        again = old.intersection(new.members).difference(before.members)
        assert not again or self.changes_slots, "consecutive epochs"
        alive = [rank for rank in before.members if rank not in self.known]
        kept = [rank for rank in alive if rank in new.members]
        without = kept[:-1]  # the last one may stay as the only one with the state
        in_order = without == alive[: len(without)]
        assert in_order or self.leaving, "the newest have to go"
        assert self.changes_slots or kept == alive, "nobody is left behind"
        assert not self.has_finished or kept == list(new.members), "no newcomers at the end"
        assert all(self.processes[rank].says_ready for rank in alive), "nobody trains on alone"
        newest = max((self.processes[r].num_steps for r in alive), default=-1)
        assert max(new.num_steps) >= newest, "the newest state is kept"
        if max(new.num_steps) < 0 and any(max(begun.num_steps) >= 0 for begun in self.epochs):
            assert new.checkpoint_step >= 0, "members without the state begin with a checkpoint"

    def check_end(self) -> None:
        """Check the claims in the docstring of the module when all events have arrived."""
        assert (self.mail, self.num_to_start) == ([], 0), "nothing is under way"
        if self.finished:
            assert self.state.is_over
            assert not self.alive, "those that wait are dismissed"
            return
        members = self.epochs[-1].members
        if self.known.issuperset(members):
            assert self.saves, "no member can be lost if none is left"
            return  # the processes that are left are too few
        assert not self.num_last, "the work ends"
        assert not self.lost.intersection(members), "the run goes on"
        assert {self.processes[rank].epoch for rank in members} == {len(self.epochs) - 1}
        assert not self.leaving.intersection(self.alive).difference(members), "they are dismissed"
        staying = set(self.alive) - self.leaving
        if self.leaving.intersection(members):
            assert len(staying) < self.limits.min_ranks
            self.seen["stayed"] += 1

    def send(self, kind: str, rank: int) -> None:
        """Send an event to the launcher, sometimes twice."""
        process = self.processes[rank]
        message = (kind, rank, process.epoch, process.num_steps)
        number = self.rng.choice([1, 1, 2])
        self.seen[f"{kind} doubled"] += number - 1
        self.mail += [message] * number

    def say_ready(self, rank: int) -> None:
        self.processes[rank].says_ready = True
        self.send("ready", rank)

    def deliver(self) -> None:
        """Deliver a message; only those of a kind from a process, or to a process, are in order."""
        kind, rank, *_ = self.rng.choice(self.mail)
        is_order = kind in {"begin", "pause"}
        kinds = {"begin", "pause"} if is_order else {kind}
        message = next(m for m in self.mail if m[0] in kinds and m[1] == rank)
        self.mail.remove(message)
        kind, rank, epoch, num_steps = message
        if not is_order:
            self.receive(kind, rank, epoch, num_steps)
        elif rank in self.lost | self.finished:
            return
        elif kind == "begin":
            begun = self.epochs[epoch]
            process = self.processes[rank]
            process.epoch, process.says_ready = epoch, False
            if not self.lost.intersection(begun.members):
                process.num_steps = max(0, begun.checkpoint_step, *begun.num_steps)
        elif not self.processes[rank].says_ready and self.processes[rank].epoch == epoch:
            self.say_ready(rank)

    def receive(self, kind: str, rank: int, epoch: int, num_steps: int) -> None:
        """Pass an event to the state machine."""
        if kind == "ready":
            is_member = rank in self.state.members
            self.seen["ready of a lost one"] += rank in self.known
            self.seen["ready of an earlier epoch"] += is_member and epoch < self.state.epoch
            self.execute(self.state.ready(rank, epoch, num_steps))
        elif kind == "finished":
            self.known.add(rank)
            self.execute(self.state.finished(rank))
        elif rank in self.known:
            assert self.state.lost(rank) == []
        elif self.state.can_lose(rank):
            self.known.add(rank)
            self.seen["loss after all were ready"] += set(self.state.missing) == {rank}
            self.execute(self.state.lost(rank))
            assert self.state.alive or self.num_to_start or self.finished, "a process follows"
        else:
            self.is_over = True  # another event has come before this one

    def kill(self) -> None:
        """Kill a process, cut it off from the launcher, or ask it to leave."""
        rank = self.rng.choice(self.alive)
        later = copy.deepcopy(self.state)  # when the losses that are under way have arrived
        under_way = {r for kind, r, *_ in self.mail if kind == "lost"} - self.known
        if all(later.can_lose(r) and [later.lost(r)] for r in (*sorted(under_way), rank)):
            self.seen["several losses under way"] += bool(under_way)
            self.lost.add(rank)
            self.send("lost", rank)

    def train(self) -> None:
        """Let the members of an epoch notice losses, end a step or finish."""
        if not self.epochs:
            return
        begun = self.epochs[-1]
        members = [rank for rank in begun.members if rank not in self.lost | self.finished]
        training = [
            rank
            for rank in members
            if self.processes[rank].epoch == begun.epoch and not self.processes[rank].says_ready
        ]
        least = min((self.processes[rank].num_steps for rank in members), default=-1)
        is_last = 0 < self.num_last <= least
        if len(members) < len(begun.members):
            for rank in training:
                if (
                    is_last
                    and self.finished.intersection(begun.members)
                    and self.rng.random() < 0.7
                ):
                    self.finish(rank)
                else:
                    self.say_ready(rank)
        elif len(training) == len(members) and is_last:
            self.finish(self.rng.choice(members))
        elif len(training) == len(members):
            behind = [rank for rank in members if self.processes[rank].num_steps == least]
            for rank in behind[: self.rng.randint(1, len(behind))]:
                self.processes[rank].num_steps += 1
            if self.saves and len(behind) == len(members) and self.rng.random() < 0.2:
                self.state.checkpoint_step = least

    def finish(self, rank: int) -> None:
        self.finished.add(rank)
        self.send("finished", rank)

    def step(self, *, kills: bool) -> None:
        if self.num_to_start and self.rng.random() < 0.5:
            self.num_to_start -= 1
            rank = len(self.processes)
            self.processes[rank] = _Process()
            self.execute(self.state.started(rank))
            if rank not in self.lost:
                self.say_ready(rank)
        if self.mail and self.rng.random() < 0.7:
            self.deliver()
        if kills and self.alive and self.rng.random() < 0.05:
            self.kill()
        if kills and self.lost and self.rng.random() < 0.05:
            self.say_ready(self.rng.choice(sorted(self.lost)))  # it was only cut off
        if kills and self.changes_slots and self.rng.random() < 0.05:
            num_leaving = self.rng.choice([0, 0, 1, 2, 8])
            self.leaving = set(self.rng.sample(self.alive, min(num_leaving, len(self.alive))))
            num_slots = self.rng.randint(0, 8)
            self.execute(self.state.slots(num_slots, self.leaving))
        self.train()


def _simulated(rng: random.Random, *, changes_slots: bool, saves: bool) -> Counter[str]:
    """Simulate a run, and return what has happened in it."""
    num_ranks = rng.randint(1, 5)
    limits = ElasticLimits(
        min_ranks=rng.randint(1, num_ranks),
        max_ranks=num_ranks + rng.randint(0, 2),
        spares=rng.randint(0, 2),
        restarts=rng.randint(0, 6),
    )
    num_last = rng.choice([0, 0, rng.randint(1, 60)])
    run = _Run(rng, limits, num_ranks, changes_slots, saves, num_last)
    for _ in range(120):
        run.step(kills=True)
    for _ in range(1000):
        run.step(kills=False)
        is_done = bool(run.finished) or not num_last
        if run.is_over or (is_done and not run.mail and not run.num_to_start):
            break
    for _ in range(30 * (not run.is_over)):
        run.step(kills=False)  # those in doubt
    if not run.is_over:
        run.check_end()
    return run.seen + Counter(ended=run.is_over, finished=bool(run.finished))


@given(
    seed=st.integers(0, 2**32),
    changes_slots=st.booleans(),
    saves=st.booleans(),
)
def test_members_keep_one_history_and_the_newest_state(seed, changes_slots, saves):
    for number in range(40):
        _simulated(random.Random(40 * seed + number), changes_slots=changes_slots, saves=saves)


def test_simulated_runs_have_late_and_doubled_events_of_all_kinds():
    seen = Counter[str]()
    for seed in range(100):
        seen += _simulated(random.Random(seed), changes_slots=seed % 2 == 0, saves=seed % 4 < 2)
    assert set(seen) == {
        "ready doubled",
        "lost doubled",
        "finished doubled",
        "ready of a lost one",
        "ready of an earlier epoch",
        "loss after all were ready",
        "several losses under way",
        "dismissed",
        "stayed",
        "finished",
        "ended",
    }


def test_no_process_replaces_a_lost_one_when_the_work_is_done():
    state = MembershipState(ElasticLimits(min_ranks=1, restarts=3), 3)
    for rank in range(3):
        state.started(rank)
    assert (state.can_replace, state.lost(1)) == (True, [Replace()])
    state.close()
    assert (state.can_replace, state.lost(2)) == (False, [])
    assert state.started(3) == [Dismiss((3,))]  # it was on its way
