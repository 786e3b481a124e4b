"""Claims about operations that finish later: in the background, in batches, as requests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from braid.comm import Group
from braid.errors import MismatchError, StaleError
from support.claims import LARGE, Claim, needs, of_rank, same

__all__ = ["ORDER_CLAIMS"]


def background_work_keeps_order(group: Group) -> None:
    """Asynchronous and synchronous calls of one group take effect in the order of the calls."""
    x = torch.ones(50_000)
    y = torch.ones(10)
    works = [group.all_reduce(x, async_op=True) for _ in range(3)]
    group.all_reduce(y)
    for work in works:
        work.wait()
        work.wait()
        assert work.done()
        assert work.exception() is None
    same(x, torch.full_like(x, float(group.size) ** 3))
    same(y, torch.full_like(y, float(group.size)))


def asking_keeps_order(group: Group) -> None:
    """A rank that only polls the last of several operations completes them all, in order."""
    x = torch.full((50_000,), float(group.rank + 1))
    with group.coalesce() as batch:
        batch.all_reduce(x)
    last = group.all_reduce(x, "product", async_op=True)
    while not last.done():
        group.advance()
    assert batch.work.done()
    total = group.size * (group.size + 1) / 2
    same(x, torch.full_like(x, total**group.size))


def background_results_are_there(group: Group) -> None:
    """A Work holds its result and calls its callback once."""
    called: list[object] = []
    work = group.all_gather(torch.tensor([group.rank]), async_op=True)
    work.add_done_callback(called.append)
    work.wait()
    same(work.result, torch.arange(group.size))
    group.barrier(async_op=True).wait()
    assert called == [work]
    work.add_done_callback(called.append)
    assert called == [work, work]


def batches_start_together(group: Group) -> None:
    """A batch sends large messages both ways without a deadlock, and fuses small all-reduces."""
    n, me = group.size, group.rank
    after, before = (me + 1) % n, (me - 1) % n
    x, y = of_rank(me, LARGE, torch.float32), torch.empty(LARGE)
    small = [torch.full((3,), float(me + i)) for i in range(5)]
    with group.coalesce() as batch:
        if n > 1:
            batch.send(x, after)
            batch.recv(y, before)
        for s in small:
            batch.all_reduce(s)
        gathered = batch.all_gather(torch.tensor([me]))
    batch.work.wait()
    assert batch.work.done()
    if n > 1:
        same(y, of_rank(before, LARGE, torch.float32))
    for i, s in enumerate(small):
        same(s, torch.full((3,), float(sum(r + i for r in range(n)))))
    same(gathered, torch.arange(n))
    before_count = group.statistics()["num_operations"]
    with group.coalesce() as batch:
        for s in small:
            batch.all_reduce(s)
    batch.work.wait()
    assert group.statistics()["num_operations"] == before_count + 1


@needs("requests_any_order")
def requests_start_in_any_order(group: Group) -> None:
    """Persistent requests may start many times, scaled, in another order on every rank."""
    n, me = group.size, group.rank
    tensors = [group.empty((size,)) for size in (4, 20_000, 300_000)] + [torch.empty(10_000)]
    requests = [group.persistent("all_reduce", x) for x in tensors]
    for step in range(4):
        for index, x in enumerate(tensors):
            x.fill_(me + index + step)
        order = [(i + me * (step + 1)) % len(tensors) for i in range(len(tensors))]
        works = [requests[i].start(scale=0.5) for i in order]
        for work in works:
            work.wait()
        for index, x in enumerate(tensors):
            total = sum(float(r + index + step) for r in range(n))
            same(x, torch.full_like(x, total * 0.5))


@needs("requests_any_order")
def other_requests_persist(group: Group) -> None:
    """Requests of other collectives than all_reduce may start in another order on every rank."""
    n, me = group.size, group.rank
    x = torch.arange(4.0 * n) + me
    row = torch.full((3,), float(me))
    requests = {
        "broadcast": group.persistent("broadcast", row, root=n - 1),
        "all_gather": group.persistent("all_gather", torch.full((2,), float(me))),
        "reduce_scatter": group.persistent("reduce_scatter", x, op="max"),
        "all_to_all": group.persistent("all_to_all", x),
    }
    for turn in range(3):
        names = sorted(requests, key=lambda name: hash((name, me + turn)))
        for work in [requests[name].start() for name in names]:
            work.wait()
        same(row, torch.full((3,), float(n - 1)))
        same(requests["all_gather"].result, torch.arange(n).repeat_interleave(2).float())
        own = torch.arange(4.0 * n)[4 * me : 4 * me + 4]
        same(requests["reduce_scatter"].result, own + n - 1)
        same(requests["all_to_all"].result, torch.cat([own + r for r in range(n)]))


@needs("requests_any_order")
def a_started_request_is_busy(group: Group) -> None:
    """Starting a request again before it has ended raises; afterwards it does not."""
    request = group.persistent("all_reduce", group.empty((8,)).fill_(1.0))
    if group.rank == 0 and group.size > 1:
        work = request.start()
        try:
            request.start()
        except StaleError as error:
            assert "is busy" in str(error)  # noqa: PT017 - not a pytest module
        else:
            raise AssertionError
        group.barrier()
        work.wait()
    else:
        group.barrier()
        request.start().wait()
    request.start().wait()


def scales_are_agreed_on(group: Group) -> None:
    """Ranks that scale one request differently all raise; none gets a different result."""
    part = group.split(0)
    assert part is not None
    if group.size == 1:
        return
    request = part.persistent("all_reduce", part.empty((8,)).fill_(1.0))
    try:
        request.start(scale=1.0 + group.rank).wait()
    except MismatchError as error:
        assert "scaled by 2.0" in str(error)  # noqa: PT017 - not a pytest module
    else:
        raise AssertionError
    group.barrier()


@needs("requests_any_order")
def groups_are_used_in_different_orders(group: Group) -> None:
    """Ranks may start operations of several groups in different orders, and wait in others."""
    n, me = group.size, group.rank
    parts = [part for part in (group.split(0) for _ in range(3)) if part is not None]
    order = [(me + i) % len(parts) for i in range(len(parts))]
    for background in (False, True):
        xs = [torch.full((70_000,), float(i + me)) for i in range(len(parts))]
        waits: dict[int, Callable[[], None]] = {}
        for i in order:
            if background:
                waits[i] = parts[i].all_reduce(xs[i], async_op=True).wait
            else:
                with parts[i].coalesce() as batch:
                    batch.all_reduce(xs[i])
                waits[i] = batch.work.wait
        for i in order if background else order[::-1]:
            waits[i]()
        for i, x in enumerate(xs):
            same(x, torch.full_like(x, float(n * i + n * (n - 1) // 2)))
    for part in parts:
        part.close()


ORDER_CLAIMS: tuple[Claim, ...] = (
    background_work_keeps_order,
    asking_keeps_order,
    background_results_are_there,
    batches_start_together,
    requests_start_in_any_order,
    other_requests_persist,
    a_started_request_is_busy,
    scales_are_agreed_on,
    groups_are_used_in_different_orders,
)
