"""What is said of processes that come late to an elastic run, or with other versions."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from braid._version import __version__
from braid.errors import ConfigError
from braid.launch import JobSpec
from braid.launch.process.job import ElasticLimits
from braid.launch.supervise.member_driver import JOIN_NOTICE_NS, LONGEST_WAIT_NS, MemberDriver
from braid.runtime.clock import VirtualClock
from braid.runtime.rendezvous import DISMISSED, JobEnvironment, NewEpoch, Ready, Stop
from braid.runtime.rendezvous.membership import _refuse_other_versions
from braid.runtime.store import HashStore


class Run:
    """A run whose ranks do nothing."""

    is_running = True

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.starts: list[int] = []
        self.journal = self
        self.ranks: dict[int, Any] = {
            rank: SimpleNamespace(
                rank=rank, name=f"rank {rank}", last_events=lambda: "", send=lambda _: None
            )
            for rank in range(3)
        }

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def start_another(self) -> None:
        self.starts.append(1)

    def note(self, kind: str, **values: object) -> None:
        """Keep nothing."""


def test_a_spare_that_does_not_come_is_named_once():
    clock, run = VirtualClock(), Run()
    limits = ElasticLimits(min_ranks=1, spares=1)
    driver = MemberDriver(JobSpec(command=("x",)), limits, run, clock, None)  # type: ignore[arg-type]
    driver.started(0)
    driver.started(1)
    driver.received(run.ranks[0], Ready(-1, -1))
    assert driver.deadline_ns == JOIN_NOTICE_NS
    clock.advance(JOIN_NOTICE_NS)
    driver.poll()
    driver.poll()
    (text,) = run.notices
    assert text.startswith("rank 1 is not ready to train 60 s after its start")
    assert driver.deadline_ns is None


@pytest.mark.parametrize(
    ("limits", "can_lose"),
    [
        (ElasticLimits(min_ranks=2, restarts=0), False),
        (ElasticLimits(min_ranks=2, restarts=1), True),
        (ElasticLimits(min_ranks=1, restarts=0), True),
    ],
)
def test_members_are_told_whether_the_run_can_go_on_without_one(limits, can_lose):
    run = Run()
    sent: list[Any] = []
    run.ranks[0].send = sent.append
    job = JobSpec(command=("x",), num_ranks=2)
    driver = MemberDriver(job, limits, run, VirtualClock(), None)  # type: ignore[arg-type]
    for rank in (0, 1):
        driver.started(rank)
        driver.received(run.ranks[rank], Ready(-1, -1))
    assert sent == [NewEpoch(0, (0, 1), (-1, -1), can_lose=can_lose)]


def training(
    clock: VirtualClock, num_ranks: int, min_ranks: int, *, num_steps: int = 1
) -> tuple[MemberDriver, Run]:
    """A driver and its run, whose members have finished some steps."""
    run = Run()
    job = JobSpec(command=("x",), num_ranks=num_ranks, hang_report_s=0)
    driver = MemberDriver(job, ElasticLimits(min_ranks=min_ranks), run, clock, None)  # type: ignore[arg-type]
    for rank in range(num_ranks):
        driver.take_place(rank)
        driver.started(rank)
        driver.received(run.ranks[rank], Ready(-1, -1))
    for _ in range(num_steps):
        driver.state.trained(0)
    return driver, run


def lose(driver: MemberDriver, rank: int) -> None:
    driver.ended(rank, has_finished=False, was_dismissed=False)


def test_a_process_starts_after_the_next_step_of_members_that_recover():
    driver, run = training(VirtualClock(), 3, min_ranks=2)
    lose(driver, 1)
    driver.state.trained(2)  # a step of the last epoch
    driver.poll()
    for rank in (0, 2):
        driver.received(run.ranks[rank], Ready(0, 1))
    driver.poll()
    assert run.starts == []
    driver.state.trained(0)
    driver.poll()
    assert (run.starts, driver.deadline_ns) == ([1], None)


def test_processes_for_two_losses_start_once_each():
    driver, run = training(VirtualClock(), 3, min_ranks=1)
    lose(driver, 1)
    driver.received(run.ranks[0], Ready(0, 1))
    lose(driver, 2)  # the next epoch begins
    assert run.starts == []
    driver.state.trained(0)
    driver.poll()
    driver.poll()
    assert run.starts == [1, 1]


def test_a_process_starts_soon_if_members_take_long_to_recover():
    clock = VirtualClock()
    driver, run = training(clock, 2, min_ranks=1)
    lose(driver, 1)
    assert (run.starts, driver.deadline_ns) == ([], LONGEST_WAIT_NS)
    clock.advance(LONGEST_WAIT_NS)
    driver.poll()
    assert run.starts == [1]


@pytest.mark.parametrize(("min_ranks", "num_steps"), [(3, 1), (2, 0)])
def test_a_process_starts_immediately_if_members_need_it_or_do_not_train(min_ranks, num_steps):
    driver, run = training(VirtualClock(), 3, min_ranks, num_steps=num_steps)
    lose(driver, 1)
    assert run.starts == [1]


def test_a_second_loss_that_leaves_too_few_members_starts_both_processes():
    driver, run = training(VirtualClock(), 3, min_ranks=2)
    lose(driver, 1)
    assert run.starts == []
    lose(driver, 2)
    assert run.starts == [1, 1]


def test_a_process_starts_immediately_if_members_go_back_to_a_checkpoint():
    driver, run = training(VirtualClock(), 3, min_ranks=1)
    driver.state.checkpoint_step = 1
    lose(driver, 1)
    for rank in (0, 2):
        driver.received(run.ranks[rank], Ready(0, 1))
    assert run.starts == []
    for rank in (0, 2):  # a part of the state is lost
        driver.received(run.ranks[rank], Ready(1, -1))
    assert run.starts == [1]


def test_no_process_starts_when_a_member_has_finished():
    driver, run = training(VirtualClock(), 3, min_ranks=2)
    lose(driver, 1)
    driver.ended(0, has_finished=True, was_dismissed=False)
    driver.poll()
    assert (run.starts, driver.deadline_ns) == ([], None)


@pytest.mark.parametrize("has_spare", [True, False])
def test_a_rank_that_offers_to_leave_stays_if_the_spare_has_died(has_spare):
    run = Run()
    sent: list[Any] = []
    run.ranks[1].send = sent.append
    job = JobSpec(command=("x",), num_ranks=2)
    limits = ElasticLimits(min_ranks=2, spares=1, restarts=0)
    driver = MemberDriver(job, limits, run, VirtualClock(), None)  # type: ignore[arg-type]
    for rank in (0, 1, 2):
        driver.take_place(rank)
        driver.started(rank)
        driver.received(run.ranks[rank], Ready(-1, -1))
    assert sent.pop().can_lose
    if not has_spare:
        driver.ended(2, has_finished=False, was_dismissed=False)
    driver.received(run.ranks[1], Ready(0, 5, "is slow", is_offer=True))
    driver.received(run.ranks[0], Ready(0, 5))
    if has_spare:
        assert run.notices[0] == "rank 1 is slow, and leaves the run"
        assert sent == [Stop(DISMISSED)]
    else:
        assert run.notices[0] == (
            "rank 1 is slow, and stays, since the run cannot go on without it: look at its host, "
            "or allow another process with --restarts"
        )
        assert sent == [NewEpoch(1, (0, 1), (5, 5), can_lose=False)]


def test_a_process_takes_the_role_of_the_rank_that_was_lost():
    run = Run()
    job = JobSpec(command=("x",), num_ranks=3, expendable=frozenset({1, 2}))
    driver = MemberDriver(job, ElasticLimits(min_ranks=1), run, VirtualClock(), None)  # type: ignore[arg-type]
    assert [driver.take_place(rank) for rank in range(3)] == [(0, ""), (1, ""), (2, "")]
    for rank in range(3):
        driver.started(rank)
    driver.ended(1, has_finished=True, was_dismissed=False)
    driver.ended(2, has_finished=False, was_dismissed=False)
    assert driver.take_place(3) == (2, "newcomer")
    driver.started(3)
    assert run.notices == ["rank 3 takes the role of rank 2; restarts left: 2"]
    assert driver.changes.successors == {2: 3}
    assert driver.deadline_ns is None


def test_a_process_takes_the_role_for_which_it_was_started():
    run = Run()
    job = JobSpec(command=("x",), num_ranks=4, expendable=frozenset({1, 2, 3}))
    limits = ElasticLimits(min_ranks=1, restarts=2)
    driver = MemberDriver(job, limits, run, VirtualClock(), None)  # type: ignore[arg-type]
    for rank in (0, 1, 2):
        driver.take_place(rank)
        driver.started(rank)
    driver.ended(2, has_finished=False, was_dismissed=False)
    assert driver.take_place(3) == (3, "")  # all founders come first
    driver.started(3)
    driver.ended(3, has_finished=False, was_dismissed=False)
    driver.ended(1, has_finished=False, was_dismissed=False)  # no restart is left
    assert [driver.take_place(rank) for rank in (4, 5)] == [(2, "newcomer"), (3, "newcomer")]


class Slots:
    """Slots of hosts that a test changes."""

    deadline_ns = 0

    def __init__(self, **hosts: int) -> None:
        self.hosts = hosts
        self.losses: list[str] = []

    def poll(self) -> tuple[bool, str]:
        return True, ""

    def lost(self, host: str, *, is_gone: bool = False) -> None:
        assert not is_gone
        self.losses.append(host)


def run_on(slots: Slots, num_ranks: int, **limits: Any) -> tuple[MemberDriver, Any]:
    """A driver and its run, which keeps the ranks that it is to start and to dismiss."""
    run: Any = Run()
    run.dismissed = []
    run.dismiss = run.dismissed.append
    job = JobSpec(command=("x",), num_ranks=num_ranks)
    elastic = ElasticLimits(min_ranks=1, max_ranks=4, **limits)
    return MemberDriver(job, elastic, run, VirtualClock(), slots), run


def start(driver: MemberDriver, run: Any, rank: int) -> tuple[str, int, str]:
    """Start a rank, which gets ready; return its host, its place there and its role."""
    place, role = driver.take_place(rank)
    host = driver.host_of(rank)
    run.ranks[rank] = SimpleNamespace(
        rank=rank, host=host, send=lambda _: None, name="", last_events=lambda: ""
    )
    driver.started(rank)
    driver.received(run.ranks[rank], Ready(-1, -1))
    return host, place, role


def test_ranks_take_free_slots_of_hosts_and_the_newest_leave_a_host_with_fewer():
    slots = Slots(a=1, b=2)
    driver, run = run_on(slots, 3, restarts=0, gains_slots=True)
    found = [start(driver, run, rank) for rank in range(3)]
    assert found == [("a", 0, "founder"), ("b", 0, "founder"), ("b", 1, "founder")]
    slots.hosts = {"a": 1, "b": 1, "c": 2}
    driver.poll()
    assert len(run.starts) == 2
    found = [start(driver, run, rank) for rank in (3, 4)]
    assert found == [("c", 0, "newcomer"), ("c", 1, "newcomer")]
    for rank in range(3):
        driver.received(run.ranks[rank], Ready(0, 1))
    assert (driver.state.members, run.dismissed) == ((0, 1, 3, 4), [2])
    driver.ended(3, has_finished=False, was_dismissed=False)
    slots.hosts = {"a": 1, "b": 2}
    driver.poll()
    assert (slots.losses, len(run.starts)) == (["c"], 3)
    assert start(driver, run, 5) == ("b", 1, "newcomer"), "the place of the rank that was dismissed"


def test_ranks_of_a_lost_host_use_up_no_restarts_and_spares_need_no_slot():
    slots = Slots(a=1, b=2)
    driver, run = run_on(slots, 3, spares=1, restarts=3)
    found = [start(driver, run, rank) for rank in range(4)]
    assert found[3] == ("a", 1, "newcomer")
    driver.poll()
    assert driver.state.members == (0, 1, 2)
    assert not run.starts
    slots.hosts = {"a": 1}
    for rank in (1, 2):
        driver.ended(rank, has_finished=False, was_dismissed=False)
    assert (run.starts, driver.state.restarts_left) == ([], 3)
    driver.received(run.ranks[0], Ready(0, 1))
    assert driver.state.members == (0,)
    assert driver.state.alive == {0, 3}, "the spare waits beside the only slot"


def test_members_without_a_slot_leave_one_after_another():
    slots = Slots(a=2, b=2)
    driver, run = run_on(slots, 4, restarts=3)
    for rank in range(4):
        start(driver, run, rank)
    slots.hosts = {"b": 2}

    def end_step() -> tuple[int, ...]:
        driver.state.trained(3)
        driver.poll()
        epoch, members = driver.state.epoch, driver.state.members
        for rank in members:
            driver.received(run.ranks[rank], Ready(epoch, 1))
        return driver.state.members

    driver.poll()
    assert driver.state.missing == (), "no member may leave before copies of all parts are made"
    assert [end_step() for _ in range(2)] == [(0, 2, 3), (2, 3)]
    driver.leaving = {2, 3}  # their host was asked to end
    slots.hosts = {"b": 0}
    assert end_step() == (2, 3), "they leave by themselves"


def test_a_replacing_process_has_the_rank_of_the_lost_one():
    launched = JobEnvironment(rank=7, world_size=4, replaces=2, run_id="r", launched_by="braid")
    launched = replace(launched, store_address="unix:@x", secret_fd=3, events_fd=4, stacks_fd=5)
    environ = launched.to_environ()
    assert (environ["RANK"], environ["WORLD_SIZE"]) == ("2", "4")
    assert JobEnvironment.parse(environ) == replace(launched, num_nodes=1)
    assert (launched.place, JobEnvironment(rank=1, world_size=2).place) == (2, 1)


def test_a_process_with_another_torch_is_refused(monkeypatch):
    store = HashStore()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="1.0"))
    _refuse_other_versions(store, 2)
    _refuse_other_versions(store, 0)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="1.1"))
    expected = f"rank 3 has braid {__version__} and torch 1.1, but rank 2 has braid"
    with pytest.raises(ConfigError, match=expected):
        _refuse_other_versions(store, 3)
