"""Each rank decides for itself how it starts, polls and waits; what comes out is the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from braid.comm import Group, StepsBy, Work
from support.worlds import run_threads

N = 3
NUM_STEPS = 20
SIZES = (0, 1, 1000, 70_000, 200_000)
Claim = Callable[[], bool]


def _own_rank(group: Group, size: int) -> torch.Tensor:
    return torch.full((size,), float(group.rank))


def _every_rank(size: int) -> torch.Tensor:
    return torch.arange(float(N)).repeat_interleave(size)


def _all_reduce(group, size, target, **how):
    x = torch.ones(size)
    return target.all_reduce(x, **how), lambda: torch.equal(x, torch.full((size,), float(N)))


def _broadcast(group, size, target, **how):
    x = _own_rank(group, size)
    return target.broadcast(x, 1, **how), lambda: torch.equal(x, torch.ones(size))


def _all_gather(group, size, target, **how):
    out = torch.empty(N * size)
    work = target.all_gather(_own_rank(group, size), out=out, **how)
    return work, lambda: torch.equal(out, _every_rank(size))


def _reduce_scatter(group, size, target, **how):
    out = torch.empty(size)
    work = target.reduce_scatter(torch.ones(N * size), out=out, **how)
    return work, lambda: torch.equal(out, torch.full((size,), float(N)))


def _all_to_all(group, size, target, **how):
    out = torch.empty(N * size)
    work = target.all_to_all(_own_rank(group, N * size), out=out, **how)
    return work, lambda: torch.equal(out, _every_rank(size))


OPERATIONS = (_all_reduce, _broadcast, _all_gather, _reduce_scatter, _all_to_all)


def _started(
    group: Group, operation: Callable, size: int, own: random.Random
) -> tuple[list[Work], Claim]:
    """`operation` begun in one of the four ways."""
    way = own.choice(("wait", "background", "block", "lazy block"))
    if way == "wait":
        return [], operation(group, size, group)[1]
    if way == "background":
        work, claim = operation(group, size, group, async_op=True)
        return [work], claim
    with group.coalesce(
        steps_by=StepsBy.WAITER if way == "lazy block" else StepsBy.CALLER
    ) as batch:
        _, claim = operation(group, size, batch)
    return [batch.work], claim


def _ring(group: Group, size: int, tag: int) -> tuple[list[Work], Claim]:
    out, left = torch.empty(size), (group.rank - 1) % N
    sent = group.send(_own_rank(group, size), (group.rank + 1) % N, tag=tag, async_op=True)
    received = group.recv(out, left, tag=tag, async_op=True)
    return [sent, received], lambda: torch.equal(out, torch.full((size,), float(left)))


def _step(
    groups: list[Group], common: random.Random, own: random.Random
) -> Iterator[tuple[list[Work], Claim]]:
    for tag in range(common.randrange(1, 7)):
        group, size = common.choice(groups), common.choice(SIZES)
        operation = common.choice((*OPERATIONS, None))
        if operation is None:
            yield _ring(group, size, tag)
        else:
            yield _started(group, operation, size, own)


def _mixture(group: Group, seed: int) -> list[list[bool]]:
    """Of every step, whether each of its operations gave what it must."""
    common, own = random.Random(seed), random.Random(1000 * seed + group.rank)
    groups = [group, group.split(0), group.split(0, -group.rank)]
    held = []
    for _ in range(NUM_STEPS):
        begun = list(_step(groups, common, own))
        works = [work for some, _ in begun for work in some]
        own.shuffle(works)
        while own.random() < 0.5 and not all(work.done() for work in works):
            pass
        for work in works:
            work.wait()
        held.append([claim() for _, claim in begun])
    return held


def _holds(seed: int) -> bool:
    first, *others = run_threads(N, _mixture, seed)
    return all(map(all, first)) and others == [first] * (N - 1)


@pytest.mark.parametrize("seed", range(3))
def test_ranks_need_not_start_and_wait_in_the_same_way(seed):
    assert _holds(seed)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(3, 60))
def test_ranks_need_not_start_and_wait_in_the_same_way_in_many_mixtures(seed):
    assert _holds(seed)


def _asks_one_only(group: Group) -> float:
    """Rank 0 leaves a lazy block alone and asks only for background work of another group, which needs the block at rank 1."""
    other = group.split(0)
    x, y = torch.ones(SIZES[-1]), torch.ones(1)
    if group.rank == 0:
        with group.coalesce(steps_by=StepsBy.WAITER) as batch:
            batch.all_reduce(x)
        work = other.all_reduce(y, async_op=True)
        while not work.done():
            pass
        batch.work.wait()
    else:
        group.all_reduce(x)
        other.all_reduce(y)
    return x[-1].item() + y.item()


def test_asking_for_background_work_takes_the_steps_of_everything_started():
    assert run_threads(2, _asks_one_only) == [4.0, 4.0]
