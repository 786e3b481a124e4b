"""Groups that are garbage-collected without `close`."""

from __future__ import annotations

import gc
from typing import Any

import torch
from training import said_by

from braid.comm import Group
from braid.parallel.gradients.lost_requests import reclaim_lost_requests

SIZE = 2


def _drops_groups(group: Group) -> list[int]:
    used = []
    for _ in range(60):
        part = group.split(0)
        assert part is not None
        part.all_reduce(torch.ones(20_000))
        del part
        gc.collect()
        used.append(group.engine.transport.arena.statistics()["used_bytes"])
    return used


def test_groups_that_are_dropped_give_their_memory_back(world):
    for used in world(SIZE, _drops_groups):  # ranks may be some groups apart
        assert max(used) < used[0] + 20 * 130_000  # bytes of a group: 60 would be 7,800,000


def _drops_while_under_way(group: Group) -> list[Any]:
    part = group.split(0)
    assert part is not None
    x = torch.full((20_000,), 1.0 + group.rank)
    if group.rank == 0:
        work = part.all_reduce(x, async_op=True)
        del part
        gc.collect()
    others = [group.split(0) for _ in range(3)]  # close what rank 0 holds no more
    later = [other.all_reduce(torch.full((20_000,), 1.0 + group.rank)) for other in others if other]
    if group.rank == 0:
        work.wait()
    else:
        part.all_reduce(x)
    return [float(y.sum()) for y in (x, *later)]


def test_what_is_under_way_outlives_its_group(world):
    assert world(SIZE, _drops_while_under_way) == [[60_000.0] * 4] * SIZE


def _needs_a_dropped_group(group: Group) -> str:
    part = group.split(0)
    assert part is not None
    part.barrier()
    if group.rank == 0:
        del part
        gc.collect()
    group.split(0)
    return "" if group.rank == 0 else said_by(part.barrier)


def test_a_member_that_still_needs_a_dropped_group_is_told_so(world):
    text = world(SIZE, _needs_a_dropped_group)[1]
    assert text.startswith("PeerLostError: rank 0 has already left (it closed the group)")


def _drops_requests_under_way(group: Group) -> int:
    for _ in range(10):
        reclaim_lost_requests(group)
        request = group.persistent("all_reduce", torch.ones(20_000))
        if group.rank == 0:
            request.start()
            del request
            gc.collect()
        group.barrier()
        if group.rank == 1:
            request.start().wait()
            del request
            gc.collect()
        group.barrier()  # rank 0 takes the steps that are left
    return group.numbers.next()


def test_channels_of_requests_that_ended_after_their_drop_are_used_again(world):
    assert max(world(SIZE, _drops_requests_under_way)) <= 3
