"""What a group says to calls that cannot work, and calls that look so and do."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from braid.comm import Group
from braid.errors import CommTimeout, ConfigError, PeerLostError
from support.worlds import run_threads


def _receives_another_tag(group: Group, over: threading.Event) -> str:
    if group.rank == 0:
        group.send(torch.ones(4), 1, tag=3)
        over.wait(10)
        return ""
    with pytest.raises(CommTimeout) as caught:
        group.recv(torch.empty(4), 0, tag=4, timeout_s=0.2)
    over.set()
    return str(caught.value)


def test_a_receive_that_waits_in_vain_says_what_was_sent_last():
    _, text = run_threads(2, _receives_another_tag, threading.Event())
    assert "rank 0  last sent message(float32[4])" in text
    assert "the same tag" in text


def _sends_in_vain(group: Group, over: threading.Event) -> str:
    if group.rank != 0:
        over.wait(10)
        return ""
    with pytest.raises(CommTimeout) as caught:
        group.send(torch.ones(1 << 20), 1, timeout_s=0.2)
    over.set()
    return str(caught.value)


def test_a_send_that_waits_in_vain_names_its_receiver_only():
    text, *_ = run_threads(3, _sends_in_vain, threading.Event())
    assert "rank 1  has not received it" in text
    assert "rank 2" not in text


def _writes_down_twice(group: Group) -> list[float]:
    x = torch.full((4,), float(group.rank + 1))
    with group.coalesce() as batch:
        batch.broadcast(x)
        batch.all_reduce(x)
        batch.all_reduce(torch.ones(4))
    batch.work.wait()
    y, z = torch.zeros(4), torch.zeros(4)
    strided = torch.ones(2, 2).t()
    for first, second in [
        ((x, x), (x[2:], x[2:])),
        ((x, y), (y, z)),
        ((strided, strided), (strided, strided)),
    ]:
        block = group.coalesce()
        block.all_reduce(first[0], out=first[1])
        block.all_reduce(second[0], out=second[1])
        with pytest.raises(ConfigError, match=r"share memory \(shapes \["):
            block.__exit__(None, None, None)
    columns = torch.ones(2, 2)
    with (
        group.coalesce() as batch
    ):  # interleaved, but apart; the second writes what the first has read
        batch.all_reduce(columns[:, 0], out=y[:2])
        batch.all_reduce(columns[:, 1], out=columns[:, 0])
    batch.work.wait()
    assert (y[:2].tolist(), columns.tolist()) == ([2.0, 2.0], [[2.0, 1.0]] * 2)
    return x.tolist()


def test_operations_of_a_block_take_effect_in_order_and_what_cannot_is_refused(world):
    assert world(2, _writes_down_twice) == [[2.0] * 4] * 2


def _by_name(group: Group) -> list[float]:
    tensors = [group.empty((4,)).fill_(1) for _ in range(2)]
    with group.coalesce() as batch:
        for x in tensors:
            batch.all_reduce(x, algorithm="registered")
    batch.work.wait()
    return [x[0].item() for x in tensors]


def test_all_reduces_of_a_block_keep_the_algorithm_that_they_name(world):
    assert world(2, _by_name) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("kind", "x"), [("all_reduce", torch.ones(3, dtype=torch.int64)), ("broadcast", torch.ones(3))]
)
def test_a_factor_is_refused_where_it_could_not_be_applied(world, kind, x):
    def start(group: Group) -> None:
        with pytest.raises(ConfigError, match="works for all_reduce or reduce_scatter"):
            group.persistent(kind, x.clone()).start(scale=0.5)

    world(1, start)


def _result_overlaps(group: Group) -> list[list[float]]:
    one, two = torch.arange(6.0), torch.arange(6.0)
    group.all_reduce(one[2:6], out=one[0:4])
    group.reduce(two[2:6], 0, out=two[0:4] if group.rank == 0 else None)
    return [one[:4].tolist(), two[:4].tolist()]


def test_a_result_may_overlap_what_is_reduced(world):
    sums = [4.0, 6.0, 8.0, 10.0]
    assert world(2, _result_overlaps) == [[sums, sums], [sums, [0.0, 1.0, 2.0, 3.0]]]


BAD_TENSORS = [
    lambda g: g.all_reduce(torch.ones(2).to_sparse()),
    lambda g: g.all_reduce(torch.ones(2).to_sparse(), out=torch.empty(2)),
    lambda g: g.all_reduce(torch.ones(2, device="meta"), out=torch.empty(2, device="meta")),
]
BAD_NUMBERS = [
    lambda g: g.broadcast(torch.ones(2), 1.0),
    lambda g: g.reduce(torch.ones(2), "0"),
    lambda g: g.recv(torch.ones(2), 0.0),
    lambda g: g.send(torch.ones(2), (g.rank + 1) % g.size, tag="a"),
    lambda g: g.all_reduce(torch.ones(2), timeout_s=timedelta(seconds=3)),
    lambda g: g.all_reduce(torch.ones(2), timeout_s=-1),
    lambda g: g.all_reduce(torch.ones(2), timeout_s=float("nan")),
    lambda g: g.empty("a"),
    lambda g: g.empty((2, -1)),
    lambda g: g.empty((2,), "float32"),
    lambda g: g.adopt([1.0]),
    lambda g: g.split("a"),
    lambda g: g.split(0, "a"),
]


def _passes_bad_numbers(group: Group) -> None:
    for call in BAD_NUMBERS + BAD_TENSORS:
        with pytest.raises(ConfigError):
            call(group)
    work = group.barrier(async_op=True)  # nothing has been started before
    for timeout_s in ("a", -1, timedelta(seconds=3)):
        with pytest.raises(ConfigError, match="timeout_s must be a number of seconds"):
            work.wait(timeout_s)
    work.wait()


def test_numbers_of_another_type_are_refused_before_anything_starts(world):
    world(2, _passes_bad_numbers)


def _in_inference_mode(group: Group) -> list[float]:
    n = group.size
    with torch.inference_mode():
        x = torch.ones(3)
        work = group.all_reduce(x, async_op=True)
        strided = torch.ones(4, 2)[:, 0]
        group.all_reduce(strided)
        gathered = group.all_gather(torch.ones(2))
        later = group.all_reduce(torch.ones(300_000), async_op=True)
    work.wait()
    later.wait()
    group.all_reduce(gathered)
    group.all_reduce(x)
    outside = group.all_reduce(torch.ones(3))
    tensors = (x, strided, gathered, later.result, outside)
    assert [t[0].item() for t in tensors] == [n * n, n, n, n, n]
    return [t[-1].item() for t in tensors]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tensors_of_inference_mode_are_ordinary(world, size):
    n = float(size)
    assert world(size, _in_inference_mode) == [[n * n, n, n, n, n]] * size


def _closes_the_world(group: Group, over: threading.Event) -> str:
    group.barrier()
    if group.rank == 0:
        group.close()
        over.wait(10)
        return ""
    with pytest.raises(PeerLostError) as caught:
        group.barrier()
    over.set()
    return str(caught.value)


def test_a_closed_world_is_known_to_its_members():
    _, text = run_threads(2, _closes_the_world, threading.Event())
    assert "rank 0 has already left" in text


def _scatters_to_another_size(group: Group, algorithm: str | None, over: threading.Event) -> str:
    if group.rank != 0:
        with pytest.raises(CommTimeout):
            group.scatter(out=torch.zeros(3), algorithm=algorithm, timeout_s=0.2)
        over.set()
        return ""
    x = torch.arange(2.0 * group.size)
    with pytest.raises(ConfigError) as caught:
        group.scatter(x, out=torch.zeros(3), algorithm=algorithm)
    over.wait(10 if group.size > 1 else 0)
    return str(caught.value)


@pytest.mark.parametrize(("size", "algorithm"), [(1, None), (2, "tree"), (2, "naive")])
def test_a_root_refuses_an_out_of_another_size_than_its_part(size: int, algorithm: str | None):
    text, *_ = run_threads(size, _scatters_to_another_size, algorithm, threading.Event())
    assert "the part of this rank has 2 elements, but out has shape [3]" in text


def _names_hierarchical(group: Group) -> str:
    with pytest.raises(ConfigError) as caught:
        group.all_reduce(torch.ones(2), algorithm="hierarchical")
    return str(caught.value)


def test_an_algorithm_for_several_hosts_is_refused_with_algorithms_of_the_same_operation():
    (text,) = run_threads(1, _names_hierarchical)
    assert "halving_doubling, tree, torus, naive," in text
    assert "hypercube" not in text  # an all-gather
