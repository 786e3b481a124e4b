"""Survivors go on with a group of their own: old requests are stale, new ones work, whoever died and however many."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest
import torch

from braid.comm import Group
from braid.comm.api.rebuild import meet_survivors, together
from braid.errors import BraidError, CommError, CommTimeout, ConfigError, PeerLostError, StaleError
from braid.runtime.transport import Loss
from support.claims import same
from support.pool import RankDiedError
from support.worlds import run_threads

pytestmark = pytest.mark.procs


def _answers(run, size: int, main, *args) -> dict[int, object]:
    """What the survivors returned."""
    with pytest.raises(RankDiedError) as caught:
        run(size, main, *args)
    answers = caught.value.answers
    assert [answer.error for answer in answers.values()] == [None] * len(answers)
    return {rank: answer.result for rank, answer in answers.items()}


def _works(group: Group) -> None:
    """Collectives, messages, requests and further groups, large and small."""
    total = float(sum(group.ranks))
    for numel in (7, 300_001):
        x = torch.full((numel,), float(group.context.rank))
        same(group.all_reduce(x), torch.full((numel,), total))
    request = group.persistent("all_reduce", torch.ones(1000))
    request.start().wait()
    same(request.result, torch.full((1000,), float(group.size)))
    if group.size > 1:
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        group.send(torch.tensor([group.rank]), right)
        same(group.recv(torch.empty(1, dtype=torch.int64), left), torch.tensor([left]))
    pair = group.split(group.rank % 2)
    same(pair.all_reduce(torch.ones(3)), torch.full((3,), float(pair.size)))
    work = group.all_reduce(torch.ones(5), async_op=True)
    work.wait()


def _loses(group: Group, victims: tuple[int, ...], numel: int) -> tuple:
    request = group.persistent("all_reduce", torch.ones(numel))
    sub = group.split(0)
    group.barrier()
    if group.rank in victims:
        delay = 0.05 * (1 + victims.index(group.rank))
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            request.start().wait()
    except CommError:
        pass
    new = group.rebuild()
    if len(new.ranks) + len(victims) > group.size:  # a second one dies only now
        try:
            while True:
                new.all_reduce(torch.ones(numel))
        except CommError:
            new = new.rebuild()
    stale = []
    for old in (
        lambda: request.start().wait(),
        lambda: group.all_reduce(torch.ones(3)),
        group.barrier,
        group.rebuild,
    ):
        with pytest.raises(StaleError) as caught:
            old()
        stale.append(type(caught.value).__name__)
    _works(new)
    after = sub.rebuild()
    _works(after)
    return new.ranks, new.epoch >= 1, group.current is new, after.ranks, new.rank


@pytest.mark.parametrize(
    ("size", "victims", "numel"),
    [
        (2, (1,), 1000),
        (3, (0, 2), 70_000),
        pytest.param(3, (0,), 300_001, marks=pytest.mark.proof),
        pytest.param(3, (1,), 10, marks=pytest.mark.proof),
    ],
)
def test_survivors_go_on_without_being_started_anew(pool, size, victims, numel):
    left = tuple(r for r in range(size) if r not in victims)
    found = _answers(pool.run, size, _loses, victims, numel)
    assert found == {rank: (left, True, True, left, i) for i, rank in enumerate(left)}


@pytest.mark.parametrize(
    "victims", [(1,), *(pytest.param(v, marks=pytest.mark.proof) for v in ((3,), (0, 1)))]
)
def test_survivors_of_several_hosts_go_on(hosts, victims):
    left = tuple(r for r in range(4) if r not in victims)
    found = _answers(hosts, 4, _loses, victims, 300_001)
    assert found == {rank: (left, True, True, left, i) for i, rank in enumerate(left)}


def _dies_while_they_talk(group: Group) -> tuple[int, ...]:
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 2:  # never comes to the meeting
        try:
            group.barrier()
        except PeerLostError:
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            group.barrier()
    except CommError:
        return group.rebuild().ranks


def test_who_dies_during_the_meeting_is_left_out(pool):
    assert _answers(pool.run, 4, _dies_while_they_talk) == {0: (0, 3), 3: (0, 3)}


def _named(group: Group) -> list[str]:
    """Survivors that the program names itself; nobody has died."""
    found = []
    for wrong in ([0, 1, 5], [r for r in range(group.size) if r != group.rank]):
        sub = group.split(0)
        with pytest.raises(ConfigError) as caught:
            sub.rebuild(wrong)
        found.append(str(caught.value).partition(" must")[0])
    if group.rank < 2:
        pair = group.rebuild([0, 1])
        _works(pair)
        found.append(str(pair.ranks))
    return found


def test_a_program_can_name_the_survivors(world):
    assert world(3, _named) == [
        ["survivors [0, 1, 5]", "survivors [1, 2]", "(0, 1)"],
        ["survivors [0, 1, 5]", "survivors [0, 2]", "(0, 1)"],
        ["survivors [0, 1, 5]", "survivors [0, 1]"],
    ]


def test_a_rank_that_others_have_given_up_goes_no_further():
    def main(group: Group) -> str:
        if group.rank != 1:
            group.context.health.report(Loss(1, "did not answer"))
        else:  # it wakes up when the others have decided
            group.context.store.wait(["rebuild/x/decision"], 20.0)
        try:
            words = meet_survivors(
                group.context, group.ranks, None, name="x", value=f"w{group.rank}", timeout_s=20.0
            )
        except BraidError as error:
            return type(error).__name__
        return str(words)

    left = str({0: "w0", 2: "w2"})
    assert run_threads(3, main) == [left, "StaleError", left]


def test_the_first_decision_stands_even_if_it_names_one_who_died_since():
    def main(group: Group) -> str:
        if group.rank == 2:
            group.context.store.set("rebuild/x/2", b"|w2")
            group.context.store.wait(["over/0", "over/1"], 20.0)
            return ""
        group.context.store.wait(["rebuild/x/2"], 20.0)
        if group.rank == 1:  # has heard of the death; rank 0 has not, and decided first
            group.context.store.wait(["rebuild/x/decision"], 20.0)
            group.context.health.report(Loss(2, "died"))
        else:
            group.context.store.set("rebuild/x/1", b"|w1")
        words = meet_survivors(
            group.context, group.ranks, None, name="x", value=f"w{group.rank}", timeout_s=20.0
        )
        group.context.store.set(f"over/{group.rank}", b"")
        return str(list(words))

    assert run_threads(3, main) == ["[0, 1, 2]", "[0, 1, 2]", ""]


def test_who_neither_comes_nor_dies_is_named():
    def main(group: Group) -> str:
        if group.rank == 1:
            group.context.store.wait(["over/0", "over/2"], 20.0)
            return ""
        with pytest.raises(CommTimeout) as caught:
            group.rebuild(timeout_s=0.2)
        group.context.store.set(f"over/{group.rank}", b"")
        return str(caught.value)

    for rank, text in enumerate(run_threads(3, main)):
        assert text.startswith("ranks [1] neither joined") or rank == 1


def test_of_two_that_have_lost_each_other_the_later_one_is_left_out():
    assert together([0, 1, 2], [[1], [0], []], []) == [0, 2]
    assert together([0, 1, 2, 3], [[], [2], [1], [1]], []) == [0, 1]
    assert together([0, 2], [[], []], [2]) == [0]


def test_a_second_attempt_goes_on_with_what_was_said_in_the_first():
    def main(group: Group) -> list[float]:
        store = group.context.store
        if group.rank == 0:
            with pytest.raises(CommTimeout):
                group.rebuild(timeout_s=0.1)
            store.set("first attempt is over", b"")
        else:
            store.wait(["first attempt is over"], 20.0)
        new = group.rebuild(timeout_s=20.0)
        return new.all_reduce(torch.ones(3)).tolist()

    assert run_threads(2, main) == [[2.0, 2.0, 2.0]] * 2


def _cut_off(group: Group) -> tuple:
    """The connection between ranks 0 and 4 breaks, though both live; hosts of two ranks."""
    try:
        group.barrier()
        if group.rank == 0:
            link = group.engine.transport._links.by_rank[4]
            link._connection._socket.shutdown(socket.SHUT_RDWR)
        while True:
            group.all_reduce(torch.ones(10_000), timeout_s=20.0)
    except CommError as error:
        kind = type(error).__name__
    try:
        new = group.rebuild(timeout_s=20.0)
    except StaleError:
        return kind, None
    _works(new)
    return kind, new.ranks


def test_ranks_that_cannot_reach_each_other_tell_the_rest_and_do_not_stay_together(hosts):
    found = hosts(5, _cut_off)
    left_out = found.index(("PeerLostError", None))
    assert left_out in {0, 4}  # usually 4; 0 if it is the last to notice
    together = tuple(rank for rank in range(5) if rank != left_out)
    assert [found[rank] for rank in together] == [("PeerLostError", together)] * 4
