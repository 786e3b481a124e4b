"""What becomes of a collective when a member dies in it, stops for ever, forks, or has no memory left."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from braid.comm import Group
from braid.errors import CommError, CommTimeout, PeerLostError, StaleError
from support.pool import RankDiedError

pytestmark = pytest.mark.procs

NUMEL = 1 << 20  # several chunks: whoever dies is in the middle


def _halves(group: Group) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    width = NUMEL // group.size
    return [torch.ones(width)] * group.size, [torch.empty(width) for _ in range(group.size)]


def _ring(group: Group) -> None:
    with group.coalesce() as batch:
        batch.send(torch.ones(NUMEL), (group.rank + 1) % group.size)
        batch.recv(torch.empty(NUMEL), (group.rank - 1) % group.size)
    batch.work.wait()


def _in_background(group: Group) -> None:
    works = [group.all_reduce(torch.ones(NUMEL), async_op=True) for _ in range(2)]
    for work in works:
        work.wait()


OPERATIONS: dict[str, Callable[[Group], object]] = {
    "all_reduce": lambda g: g.all_reduce(torch.ones(NUMEL)),
    "in background": _in_background,
    "registered": lambda g: g.all_reduce(g.empty((NUMEL,)).fill_(1)),
    "reduce": lambda g: g.reduce(torch.ones(NUMEL), 0),
    "scan": lambda g: g.scan(torch.ones(NUMEL)),
    "broadcast": lambda g: g.broadcast(torch.ones(NUMEL), 1),
    "all_gather": lambda g: g.all_gather(torch.ones(NUMEL)),
    "reduce_scatter": lambda g: g.reduce_scatter(_halves(g)[0]),
    "all_to_all": lambda g: g.all_to_all(_halves(g)[0], out=_halves(g)[1]),
    "messages": _ring,
    "objects": lambda g: g.objects.all_gather({"rank": g.rank}),
    "barrier": lambda g: g.barrier(),
}


QUICK = ("all_reduce", "all_to_all", "messages")


def _killed_by_a_timer(group: Group, kind: str) -> str:
    group.barrier()
    if group.rank == 1:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            OPERATIONS[kind](group)
    except PeerLostError as error:
        return str(error)


def _kinds() -> list[Any]:
    """Every death costs a new pool: the others are proved when everything is."""
    return [
        kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.proof)
        for kind in OPERATIONS
    ]


@pytest.mark.parametrize("kind", _kinds())
def test_a_member_that_dies_in_it_is_named_by_all_others(pool, kind):
    with pytest.raises(RankDiedError) as caught:
        pool.run(3, _killed_by_a_timer, kind)
    assert caught.value.codes == {1: -9}
    assert sorted(caught.value.answers) == [0, 2]
    for rank, answer in caught.value.answers.items():
        assert answer.error is None, answer.error
        assert answer.result.startswith("rank 1 (pid "), (rank, answer)
        assert "died, while rank" in answer.result


def _stopped(group: Group) -> str:
    pids = [int(pid) for pid in group.all_gather(torch.tensor([os.getpid()]))]
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        group.all_reduce(torch.ones(NUMEL), timeout_s=1)
    except CommTimeout as error:
        text = str(error)
    except CommError as error:  # rank 1 goes on and finds that the others have given up
        text = f"afterwards: {error}"
    if group.rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    return text


def test_a_member_that_stops_for_ever_is_named_when_the_time_is_over(procs):
    texts = procs(3, _stopped)
    for rank in (0, 2):
        assert "all_reduce(float32[1048576], sum)" in texts[rank]
        assert "rank 1  " in texts[rank] or "rank 0 abandoned" in texts[rank], texts[rank]
    assert "rank 1  " in texts[0] or "rank 1  " in texts[2]
    assert "abandoned the group" in texts[1] or "expected" in texts[1], texts[1]


def _learns_why_another_has_stopped(group: Group, reason: str, order: tuple[int, ...]) -> str:
    """Ranks wait in a collective one after another: a later rank finds that two members have left."""
    store, turn = group.context.store, order.index(group.rank)
    if turn:
        store.wait([f"turn {turn}"], 60.0)
    try:
        if turn:
            group.all_reduce(torch.ones(3))
        else:
            group.abort(reason)
    except CommError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        store.set(f"turn {turn + 1}", b"")
        store.wait([f"turn {group.size}"], 60.0)
    return ""


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("KeyError: 'loss'", "CommError"), ("CommTimeout in barrier: late", "CommTimeout")],
)
def test_a_member_that_was_stopped_passes_on_who_stopped_first(world, reason, kind):
    error = f"{kind}: stopped because rank 2 abandoned the group: {reason}"
    texts = world(3, _learns_why_another_has_stopped, reason, (2, 1, 0))
    assert texts == [error, error, ""]


def _forks_in_it(group: Group) -> tuple[int, float]:
    x = torch.ones(NUMEL)
    work = group.all_reduce(x, async_op=True)
    pid = os.fork()
    if pid == 0:
        try:
            group.barrier()
        except StaleError:
            os._exit(7)
        os._exit(0)
    work.wait()
    _, status = os.waitpid(pid, 0)
    group.barrier()
    return os.waitstatus_to_exitcode(status), x.sum().item()


def test_a_fork_in_the_middle_harms_nobody(procs):
    assert procs(3, _forks_in_it) == [(7, 3.0 * NUMEL)] * 3


def _uses_inherited(group: Group) -> tuple[int, list[float]]:
    x = torch.full((4,), 1.0)
    request = group.persistent("all_reduce", x)
    request.start().wait()
    work = group.all_reduce(torch.ones(NUMEL), async_op=True)
    pid = os.fork()
    if pid == 0:
        x.fill_(100.0)
        refused = 0
        for use in (request.start, work.wait, work.done, group.advance):
            try:
                use()
            except StaleError:
                refused += 1
        os._exit(refused)
    _, status = os.waitpid(pid, 0)
    work.wait()
    x.fill_(1.0)
    request.start().wait()
    return os.waitstatus_to_exitcode(status), x.tolist()


def test_a_forked_child_takes_no_steps_in_its_parents_name(procs):
    results = procs(2, _uses_inherited)
    assert [total for _, total in results] == [[2.0] * 4] * 2
    assert [refused for refused, _ in results] == [4, 4]


def _asks_for_too_much(group: Group) -> tuple[str, float]:
    text = ""
    if group.rank == 0:
        with pytest.raises(CommError) as caught:
            group.empty((1 << 45,))
        text = str(caught.value)
    return text, group.all_reduce(torch.ones(1)).item()


def test_memory_that_is_not_to_be_had_is_an_error_and_the_group_goes_on(procs):
    results = procs(2, _asks_for_too_much)
    assert "not enough for 140,737,488,355,328 bytes" in results[0][0]
    assert [total for _, total in results] == [2.0, 2.0]
