"""Operations of one group take effect in the order in which they were called, whatever has to be copied for them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from braid.comm import Group, StepsBy
from braid.errors import MismatchError
from support.worlds import run_threads

N = 3
Second = Callable[[Group, torch.Tensor], object]


def _gathers(group: Group, x: torch.Tensor) -> torch.Tensor:
    return group.all_gather(x, async_op=True).result


def _reduces_elsewhere(group: Group, x: torch.Tensor) -> torch.Tensor:
    return group.all_reduce(x, "max", out=torch.empty(2, N), async_op=True).result


def _scatters_over_itself(group: Group, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(1, N)
    group.reduce_scatter(x, out=out, async_op=True)
    return out


def _exchanges_parts(group: Group, x: torch.Tensor) -> list[torch.Tensor]:
    out = [torch.empty(N) for _ in range(2)]
    group.all_to_all([x[0], x[1]], out=out, async_op=True)
    return out


def _fuses(group: Group, x: torch.Tensor) -> list[torch.Tensor]:
    first, second = torch.empty(2, N), torch.empty(2, N)
    with group.coalesce() as batch:
        batch.all_reduce(x, "max", out=first)
        batch.all_reduce(x, "max", out=second)
    return [first, second]


SECOND = [_gathers, _reduces_elsewhere, _scatters_over_itself, _exchanges_parts, _fuses]


def _values(result: object) -> list[float]:
    parts = result if isinstance(result, list) else [result]
    return sorted({float(v) for part in parts for v in part.flatten()})


def _twice(group: Group, second: Second) -> list[float]:
    """All-reduce a tensor that is not contiguous and, before it has ended, use it once more."""
    x = torch.ones(N, 2).t()
    found = []
    for _ in range(3):
        x.fill_(1.0)
        group.all_reduce(x, async_op=True)
        result = second(group, x)
        group.barrier()  # takes effect after both
        found += _values(result)
    return sorted(set(found))


@pytest.mark.parametrize("second", SECOND)
def test_an_operation_sees_what_the_one_before_it_wrote(world, second):
    expected = [4.0] if second is _scatters_over_itself else [2.0]
    assert world(2, _twice, second) == [expected, expected]


def _numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def _waits_for_the_later_tag(group: Group) -> list[float]:
    """What the first receive waits for is sent only after the second one has been answered."""
    x, y = torch.zeros(1), torch.zeros(1)
    if group.rank == 0:
        first = group.recv(x, 1, tag=1, async_op=True)
        second = group.recv(y, 1, tag=2, async_op=True)
        second.wait()
        group.send(y, 1, tag=3)
        first.wait()
    elif group.rank == 1:
        group.send(_numbers(2.0), 0, tag=2)
        group.recv(y, 0, tag=3)
        group.send(_numbers(1.0), 0, tag=1)
        x.fill_(1.0)
    return [x.item(), y.item()]


def test_a_receive_does_not_stand_behind_one_with_another_tag(world):
    assert world(2, _waits_for_the_later_tag) == [[1.0, 2.0], [1.0, 2.0]]


MANY = 300_000  # floats: several chunks


def _crowded(group: Group) -> list[list[float]]:
    """Twelve messages of two sizes and three tags, received in another order than they are sent in."""
    plan = [(tag, i, 8 if (tag + i) % 2 else MANY) for i in range(4) for tag in range(3)]
    if group.rank == 0:
        works = []
        for tag, i, numel in plan:
            works.append(
                group.send(torch.full((numel,), 10.0 * tag + i), 1, tag=tag, async_op=True)
            )
        for work in works:
            work.wait()
        return []
    found: dict[tuple[int, int], torch.Tensor] = {}
    works = []
    for tag, i, numel in sorted(plan, key=lambda one: (-one[0], one[1])):
        found[tag, i] = torch.zeros(numel)
        works.append(group.recv(found[tag, i], 0, tag=tag, async_op=True))
    for work in reversed(works):
        work.wait()
    return [sorted(set(found[tag, i].tolist())) for tag in range(3) for i in range(4)]


def test_messages_of_one_tag_keep_their_order_whoever_looks(world):
    expected = [[10.0 * tag + i] for tag in range(3) for i in range(4)]
    assert world(2, _crowded) == [[], expected]


def _any_and_named(group: Group) -> list[float]:
    """A receive from anyone and one from a named member are under way at once: the first posted gets the first."""
    n, me = group.size, group.rank
    if me:
        group.barrier()
        group.send(_numbers(float(me)), 0, tag=5)
        group.send(_numbers(10.0 * me), 0, tag=5)
        return []
    named, others = torch.zeros(1), [torch.zeros(1) for _ in range(2 * n - 3)]
    first = group.recv(named, n - 1, tag=5, async_op=True)
    works = [group.recv(x, None, tag=5, async_op=True) for x in others]
    group.barrier()
    for work in (first, *works):
        work.wait()
    sources = sorted(work.source for work in works)
    assert sources == sorted([n - 1, *(r for r in range(1, n - 1) for _ in range(2))])
    return [named.item(), *sorted(x.item() for x in others)]


@pytest.mark.parametrize("size", [2, 3])
def test_receives_from_anyone_and_from_a_named_member_may_be_under_way_together(world, size):
    sent = sorted(factor * r for r in range(1, size) for factor in (1.0, 10.0))
    first = float(size - 1)
    sent.remove(first)
    assert world(size, _any_and_named) == [[first, *sent], *([[]] * (size - 1))]


def _message_does_not_fit(group: Group) -> str:
    """The receive that finds it is not the one that it is for; neither is the one that is waited for."""
    x, y, other = torch.zeros(4), torch.zeros(3), group.split(0)
    assert other is not None
    if group.rank == 1:
        group.recv(y, 0, tag=2, async_op=True)
    work = group.recv(x, 1 - group.rank, tag=1, async_op=True)
    other.barrier()  # what is called after the mismatch has been found would be told of a group that has ended
    if group.rank == 0:
        group.send(torch.ones(4), 1, tag=2)
    with pytest.raises(MismatchError) as caught:
        work.wait()
    return str(caught.value)


def test_a_message_that_does_not_fit_is_explained_on_both_ends(world):
    text, other = world(2, _message_does_not_fit)
    assert text == other
    assert "rank 0  message(float32[4])" in text
    assert "rank 1  message(float32[3])" in text


def _on_another_device(group: Group) -> list[float]:
    """The program's default device is for its own tensors."""
    x, y, large = torch.zeros(3), torch.zeros(3), group.empty((1000,)).fill_(1.0)
    with torch.device("meta"):
        if group.rank == 1:
            group.send(x, 0, tag=1)
            group.send(x, 0, tag=2)
        if group.rank == 0:
            group.recv(y, 1, tag=2)
            group.recv(x, 1, tag=1)
        group.all_reduce(large)
        assert group.objects.all_gather("word") == ["word"] * group.size
        group.split(0)
    return [x[0].item(), large[-1].item()]


def test_the_default_device_does_not_matter(world):
    assert world(3, _on_another_device) == [[0.0, 3.0]] * 3


def _two_lines(group: Group) -> list[str]:
    """Rank 0 has begun to receive from rank 2, which sends nothing, when what rank 1 sends does not fit."""
    if group.rank == 1:
        group.send(torch.ones(4), 0)
    if group.rank:
        with pytest.raises(MismatchError) as caught:
            group.recv(torch.ones(1), 0)
        return [str(caught.value)]
    with group.coalesce() as batch:
        batch.recv(torch.zeros(2), 2)
    with pytest.raises(MismatchError) as caught:
        group.recv(torch.zeros(3), 1)
    with pytest.raises(MismatchError) as other:
        batch.work.wait()
    return [str(caught.value), str(other.value)]


def test_all_that_is_under_way_ends_with_the_same_mismatch(world):
    (text, other), *rest = world(3, _two_lines)
    assert [other, *(said for (said,) in rest)] == [text] * 3


LARGE = 1 << 20  # floats: several steps


def _behind_a_block(group: Group, over: threading.Event) -> float:
    """Rank 0 leaves an operation in the background, behind a lazy block, and waits for nothing of the group."""
    x, y = torch.ones(LARGE), torch.ones(LARGE)
    if group.rank == 0:
        with group.coalesce(steps_by=StepsBy.WAITER) as batch:
            batch.all_reduce(x)
        group.all_reduce(y, async_op=True)
        came = over.wait(20)
        batch.work.wait()
        assert came
    else:
        group.all_reduce(x)
        group.all_reduce(y)
        over.set()
    return y[-1].item()


def test_background_work_behind_a_block_needs_nobody_who_waits():
    assert run_threads(2, _behind_a_block, threading.Event()) == [2.0, 2.0]
