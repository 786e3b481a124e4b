"""The path of a small collective and of a small message through braid stays short.

Limits are the counts that were reached. A peer that is late costs calls of its own (waits, doorbells), so the smallest of
many counts is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_jobs import run as run_torch

from braid.comm import Group
from support.call_counts import CallCounts, count_calls

ROUNDS = 60


def _of_the_late(counts: list[CallCounts]) -> CallCounts:
    """The counts of whoever came last, and so waited for nobody."""
    return min(counts, key=lambda c: c.calls)


def _fewest(act: Callable[[], object], barrier: Callable[[], object]) -> CallCounts:
    for _ in range(10):
        act()
    counts = []
    for _ in range(ROUNDS):
        barrier()
        counts.append(count_calls(act))
    return _of_the_late(counts)


def _of_group(group: Group, what: str) -> CallCounts:
    x = torch.ones(256)
    if what == "synchronous":
        return _fewest(lambda: group.all_reduce(x), group.barrier)
    if what == "asynchronous":
        return _fewest(lambda: group.all_reduce(x, async_op=True).wait(), group.barrier)
    request = group.persistent("all_reduce", group.empty((256,)))
    return _fewest(lambda: request.start().wait(), group.barrier)


def _of_torch(what: str) -> CallCounts:
    x = torch.ones(256)
    if what == "synchronous":
        return _fewest(lambda: dist.all_reduce(x), dist.barrier)
    return _fewest(lambda: dist.all_reduce(x, async_op=True).wait(), dist.barrier)


@pytest.mark.parametrize(
    ("what", "calls", "files"),
    [("synchronous", 34, 15), ("asynchronous", 29, 13), ("request", 37, 16)],
)
def test_a_small_all_reduce_of_a_group_makes_few_calls(pool, what, calls, files):
    counts = _of_the_late(pool.run(2, _of_group, what, portable=False, ranks_per_host=0))
    assert counts.calls <= calls, counts.by_function
    assert counts.files <= files, counts.by_function


def test_a_small_all_reduce_between_two_hosts_makes_few_calls(pool):
    counts = _of_the_late(pool.run(2, _of_group, "synchronous", portable=False, ranks_per_host=1))
    assert counts.calls <= 49, counts.by_function
    assert counts.files <= 20, counts.by_function


@pytest.mark.parametrize(
    ("what", "calls", "files"), [("synchronous", 39, 19), ("asynchronous", 55, 23)]
)
def test_a_small_all_reduce_of_torch_makes_few_calls(pool, tmp_path, what, calls, files):
    counts = _of_the_late(run_torch(pool, tmp_path, 2, _of_torch, what))
    assert counts.calls <= calls, counts.by_function
    assert counts.files <= files, counts.by_function


def _of_messages(rank: int, messages: Any) -> CallCounts:
    """What rank 0 does to send a message, and rank 1 to receive a message that has arrived."""
    x = torch.ones(256)
    counts = []
    for _ in range(ROUNDS):
        messages.barrier()
        if rank == 0:
            counts.append(count_calls(lambda: messages.send(x, 1)))
        messages.barrier()
        if rank == 1:
            counts.append(count_calls(lambda: messages.recv(x, 0)))
    return _of_the_late(counts)


def _of_messages_of_group(group: Group) -> CallCounts:
    return _of_messages(group.rank, group)


def _of_messages_of_torch() -> CallCounts:
    return _of_messages(dist.get_rank(), dist)


def test_a_small_message_of_a_group_makes_few_calls(pool):
    counts = pool.run(2, _of_messages_of_group, portable=False, ranks_per_host=0)
    _are_at_most(counts, sent=14, received=14)


def test_a_small_message_of_torch_makes_few_calls(pool, tmp_path):
    counts = run_torch(pool, tmp_path, 2, _of_messages_of_torch)
    _are_at_most(counts, sent=20, received=20)


def _are_at_most(counts: list[CallCounts], *, sent: int, received: int) -> None:
    assert counts[0].calls <= sent, counts[0].by_function
    assert counts[1].calls <= received, counts[1].by_function


def _polls(group: Group) -> CallCounts:
    """What one look of a rank costs that waits in an all-reduce for a late one."""
    if group.rank == 1:
        group.context.store.wait(["counted"], 30.0)
        group.barrier()
        return CallCounts(0, 0, {})
    waiter = group.engine.transport.waiter
    seen: list[CallCounts] = []

    def until(ready: Callable[[], bool], check: Callable[[], None]) -> int:
        if not seen:
            seen.append(count_calls(ready))
            group.context.store.set("counted", b"")
        return type(waiter).until(waiter, ready, check)

    waiter.until = until
    try:
        group.barrier()
    finally:
        del waiter.until
    return seen[0]


def test_one_poll_of_a_waiting_rank_is_one_call(pool):
    counts, _ = pool.run(2, _polls, portable=False, ranks_per_host=0)
    assert counts.calls == 1, counts.by_function
