"""Every operation of torch.distributed over braid: with Gloo's results where Gloo has it, and what torch promises elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch_jobs import both, run

from support.pool import ProcessPool

Op = dist.ReduceOp


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that differs from rank to rank."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 7 + dist.get_rank() + 1).to(dtype).view(shape)


def reductions() -> Any:
    results = []
    for op in (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX):
        for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8):
            x = mine(5, 3, dtype=dtype)
            dist.all_reduce(x, op)
            y = mine(4, dtype=dtype)
            dist.reduce(y, 1, op)
            results += [x, y if dist.get_rank() == 1 else None]
    for op in (Op.BAND, Op.BOR, Op.BXOR):
        x = mine(6, dtype=torch.int64)
        dist.all_reduce(x, op)
        results.append(x)
    return results


def tensors_of_all_kinds() -> Any:
    transposed = mine(3, 4).t()
    trained = mine(3).requires_grad_()
    scalar = mine(1).squeeze()
    empty = torch.empty(0)
    large = mine(100_000)
    for x in (transposed, trained, scalar, empty, large):
        dist.all_reduce(x)
    with torch.no_grad():
        dist.broadcast(trained, 1)
    rooted = mine(4, 3).t()
    dist.broadcast(rooted, 0)
    half = mine(7, dtype=torch.float16)
    dist.all_reduce(half)
    complex_ = torch.complex(mine(3), -mine(3))
    dist.all_reduce(complex_)
    return [transposed, trained.detach(), scalar, empty, large, rooted, half, complex_]


def gathers() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = mine(2, 3)
    equal = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(equal, x)
    concatenated = torch.empty(2 * size, 3)
    dist.all_gather_into_tensor(concatenated, x)
    rooted = [torch.empty(2, 3) for _ in range(size)] if rank == 1 else None
    dist.gather(x, rooted, 1)
    out = torch.empty(2, 3)
    dist.scatter(out, [mine(2, 3) * r for r in range(size)] if rank == 0 else None, 0)
    return [equal, concatenated, rooted, out]


def scatters() -> Any:
    size = dist.get_world_size()
    out = torch.empty(3)
    dist.reduce_scatter_tensor(out, mine(3 * size))
    largest = torch.empty(3)
    dist.reduce_scatter_tensor(largest, mine(3 * size), Op.MAX)
    lists = torch.empty(2, 2)
    dist.reduce_scatter(lists, [mine(2, 2) * r for r in range(size)])
    return [out, largest, lists]


def exchanges() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    equal = torch.empty(2 * size, 3)
    dist.all_to_all_single(equal, mine(2 * size, 3))
    sends = [rank + other + 1 for other in range(size)]  # symmetric: receives the same lengths
    uneven = torch.empty(sum(sends), 2)
    dist.all_to_all_single(uneven, mine(sum(sends), 2), sends, sends)
    return [equal, uneven]


def messages() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    ring = torch.empty(4)
    if rank == 0:
        dist.send(mine(4), after)
        source = dist.recv(ring, before)
    else:
        source = dist.recv(ring, before)
        dist.send(mine(4), after)
    # tags pick messages, whatever the order in which they were sent
    tagged = [torch.empty(2), torch.empty(2)]
    works = [dist.isend(mine(2) * tag, after, tag=tag) for tag in (1, 2)]
    works += [dist.irecv(tagged[tag - 1], before, tag=tag) for tag in (2, 1)]
    both_ways = torch.empty(200_000)
    ops = [
        dist.P2POp(dist.isend, mine(200_000), after),
        dist.P2POp(dist.irecv, both_ways, before),
    ]
    works += dist.batch_isend_irecv(ops)
    for work in works:
        work.wait()
    anyone = torch.empty(3)
    if rank == 0:
        sources = sorted(dist.recv(anyone) for _ in range(size - 1))
    else:
        dist.send(mine(3), 0)
        sources = []
    other = mine(2, 3) if dist.get_rank() == 0 else torch.zeros(3, 2)  # as long, of another shape
    if dist.get_rank() == 0:
        dist.send(other, 1)
        dist.send(torch.tensor(7.0), 1)
    elif dist.get_rank() == 1:
        dist.recv(other, 0)
        scalar = torch.zeros(1)
        dist.recv(scalar, 0)
        other += scalar
    return other, [ring, source, tagged, both_ways, sources]


def objects() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine_ = {"rank": rank, "text": "x" * (100 * rank)}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine_)
    sent = [mine_ if rank == 0 else None]
    dist.broadcast_object_list(sent, 0)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"for {r}" for r in range(size)], 0)
    rooted = [None] * size if rank == 0 else None
    dist.gather_object(mine_, rooted, 0)
    return [gathered, sent, scattered, rooted]


def coalesced() -> Any:
    size = dist.get_world_size()
    sums = [mine(3), mine(5), mine(70_000)]
    with c10d._coalescing_manager(async_ops=True) as manager:
        for x in sums:
            dist.all_reduce(x)
    manager.wait()
    gathered = [torch.empty(2 * size), torch.empty(3 * size)]
    with c10d._coalescing_manager():
        for x in gathered:
            dist.all_gather_into_tensor(x, mine(x.numel() // size))
    scattered = [torch.empty(2), torch.empty(3)]
    with c10d._coalescing_manager():
        for x in scattered:
            dist.reduce_scatter_tensor(x, mine(x.numel() * size))
    return [sums, gathered, scattered]


def asynchronous() -> Any:
    tensors = [mine(n) for n in (1, 1000, 100_000)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    value = works[0].get_future().then(lambda future: future.value()[0] * 2).wait()
    for work in works:
        work.wait()
    states = [(work.is_completed(), work.is_success()) for work in works]
    gathered = [torch.empty(3) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine(3), async_op=True).wait()
    dist.barrier(async_op=True).wait()
    return [tensors, value, states, gathered]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "main",
    [
        reductions,
        tensors_of_all_kinds,
        gathers,
        scatters,
        exchanges,
        coalesced,
        asynchronous,
    ],
    ids=lambda main: main.__name__,
)
def test_results_are_those_of_gloo(
    pool: ProcessPool, tmp_path: Path, main: Callable[[], Any], size: int
) -> None:
    if size == 1 and main in {reductions, gathers, tensors_of_all_kinds}:
        pytest.skip("has a root 1")
    ours, theirs = both(pool, tmp_path, size, main)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_objects_arrive_as_over_gloo(pool: ProcessPool, tmp_path: Path, size: int) -> None:
    ours, theirs = both(pool, tmp_path, size, objects)
    assert ours == theirs


@pytest.mark.parametrize("size", [2, 3])
def test_messages_arrive_as_over_gloo(pool: ProcessPool, tmp_path: Path, size: int) -> None:
    ours, theirs = both(pool, tmp_path, size, messages)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# What Gloo cannot do.


def averages() -> Any:
    x, y, z = mine(4), mine(4, dtype=torch.bfloat16), mine(4)
    dist.all_reduce(x, Op.AVG)
    dist.all_reduce(y, Op.AVG)
    dist.all_reduce(z, torch._C._distributed_c10d._make_nccl_premul_sum(0.5))
    flags = torch.tensor([True, dist.get_rank() == 0, False])
    dist.all_reduce(flags, Op.SUM)
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, mine(4), Op.AVG)
    return x.tolist(), y.tolist(), z.tolist(), flags.tolist(), part.tolist()


def test_averages_scaled_sums_and_booleans(pool: ProcessPool, tmp_path: Path) -> None:
    mean, scaled = [1.5, 2.5, 3.5, 4.5], [1.5, 2.5, 3.5, 4.5]
    common = mean, mean, scaled, [True, True, False]
    assert run(pool, tmp_path, 2, averages) == [(*common, [1.5, 2.5]), (*common, [3.5, 4.5])]


def ragged() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(gathered, mine(rank + 1))
    part = torch.empty(rank + 1)
    dist.reduce_scatter(part, [torch.full((r + 1,), float(r)) for r in range(size)])
    received = [torch.empty(rank + other + 1) for other in range(size)]
    dist.all_to_all(received, [mine(rank + other + 1) for other in range(size)])
    return [x.tolist() for x in gathered], part.tolist(), [x.tolist() for x in received]


def test_lists_of_tensors_may_be_uneven(pool: ProcessPool, tmp_path: Path) -> None:
    gathered = [[1.0], [2.0, 3.0]]
    assert run(pool, tmp_path, 2, ragged) == [
        (gathered, [0.0], [[1.0], [2.0, 3.0]]),
        (gathered, [2.0, 2.0], [[1.0, 2.0], [2.0, 3.0, 4.0]]),
    ]


def stacked_results() -> Any:
    size = dist.get_world_size()
    stacked, part = torch.empty(size, 2), torch.empty(2)
    dist.all_gather_into_tensor(stacked, mine(2))
    dist.reduce_scatter_tensor(part, mine(size, 2))
    return stacked.tolist(), part.tolist()


def test_results_may_be_stacked(pool: ProcessPool, tmp_path: Path) -> None:
    gathered = [[1.0, 2.0], [2.0, 3.0]]
    expected = [(gathered, [3.0, 5.0]), (gathered, [7.0, 9.0])]
    assert run(pool, tmp_path, 2, stacked_results) == expected


def strided_results() -> Any:
    size = dist.get_world_size()
    stacked = torch.empty(3, size).t()
    dist.all_gather_into_tensor(stacked, mine(3))
    part = torch.empty(2, 2).t()
    dist.reduce_scatter_tensor(part, mine(2 * size, 2))
    exchanged = torch.empty(2, size).t()
    dist.all_to_all_single(exchanged, mine(size, 2))
    return stacked.tolist(), part.tolist(), exchanged.tolist()


def test_results_need_not_be_contiguous(pool: ProcessPool, tmp_path: Path) -> None:
    gathered = [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]
    assert run(pool, tmp_path, 2, strided_results) == [
        (gathered, [[3.0, 5.0], [7.0, 9.0]], [[1.0, 2.0], [2.0, 3.0]]),
        (gathered, [[11.0, 13.0], [15.0, 3.0]], [[3.0, 4.0], [4.0, 5.0]]),
    ]


def sparse() -> Any:
    rank = dist.get_rank()
    x = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (4,))
    dist.all_reduce(x)
    return x.to_dense().tolist()


def test_sparse_sums_are_left_to_gloo(pool: ProcessPool, tmp_path: Path) -> None:
    assert run(pool, tmp_path, 2, sparse) == [[2.0, 2.0, 2.0, 0.0]] * 2


def _coalesced(dtype: torch.dtype, num_inputs: int) -> list[bool]:
    rank, size = dist.get_rank(), dist.get_world_size()

    def inputs(r: int) -> list[torch.Tensor]:
        shapes = [(2, 2), (0,), (3,), (4, 1)][:num_inputs]
        return [torch.full(shape, 10.0 * r + i).to(dtype) for i, shape in enumerate(shapes)]

    per_rank = [[torch.empty_like(x) for x in inputs(rank)] for _ in range(size)]
    dist.all_gather_coalesced(per_rank, inputs(rank))
    per_input = [[torch.empty_like(x) for _ in range(size)] for x in inputs(rank)]
    if num_inputs != size:
        dist.distributed_c10d._get_default_group().allgather_coalesced(
            per_input, inputs(rank)
        ).wait()
        per_rank += [list(column) for column in zip(*per_input, strict=True)]
    return [
        torch.equal(x, exact)
        for r, outputs in enumerate(per_rank)
        for x, exact in zip(outputs, inputs(r % size), strict=True)
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_inputs", [1, 2, 3, 4])
def test_gathered_lists_may_be_nested_by_rank_or_by_input(pool, tmp_path, size, num_inputs):
    for dtype in (torch.float32, torch.complex64):
        for right in run(pool, tmp_path, size, _coalesced, dtype, num_inputs):
            assert all(right)
