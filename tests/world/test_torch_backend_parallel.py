"""What torch builds on process groups, over braid: FSDP2, DTensor, tensor parallel plans, ZeRO, checkpoints, meshes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch_jobs import both, run

from support.pool import ProcessPool


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(), nn.LayerNorm(16), Block())


def batch(step: int, rank: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 16, generator=generator)


def train(net: Any, optimizer: torch.optim.Optimizer, rank: int = 0, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def fully_sharded() -> Any:
    net = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    losses = train(net, torch.optim.Adam(net.parameters(), lr=0.01), dist.get_rank())
    return losses, [whole(p) for p in net.parameters()]


def tensor_parallel() -> Any:
    net = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in (net[0], net[2]):
        parallelize_module(layer, mesh, plan)
    losses = train(net, torch.optim.SGD(net.parameters(), lr=0.05))
    return losses, [whole(p) for p in net.parameters()]


def sequence_parallel() -> Any:
    net = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = {
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(net[0], mesh, {**sharded, "up": ColwiseParallel()})
    parallelize_module(net[1], mesh, SequenceParallel(sequence_dim=0))
    last = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel()}
    parallelize_module(net[2], mesh, last)
    losses = train(net, torch.optim.SGD(net.parameters(), lr=0.05))
    return losses, [whole(p) for p in net.parameters()]


def redistributed() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.arange(24.0).view(4, 6)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = rows.sum(0).redistribute(mesh, [Replicate()]).to_local()
    return columns.to_local(), columns.full_tensor(), product


def two_axes() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    net = model()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in (net[0], net[2]):
        parallelize_module(layer, mesh["model"], plan)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = train(net, optimizer, mesh["data"].get_local_rank())
    return losses, [whole(p) for p in net.parameters()]


def zero_optimizer() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported

    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    losses = train(net, optimizer, dist.get_rank())
    optimizer.consolidate_state_dict(0)
    return losses, [whole(p) for p in net.parameters()]


def functional() -> Any:
    group = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(4.0 * size) + rank
    gathered = funcol.all_gather_tensor(x, 0, group)
    scattered = funcol.reduce_scatter_tensor(x, "sum", 0, group)
    exchanged = funcol.all_to_all_single(x, [4] * size, [4] * size, group)
    sums = funcol.all_reduce_coalesced([x, 2 * x], "avg", group)
    gathers = funcol.all_gather_into_tensor_coalesced([x, 2 * x], group)
    scatters = funcol.reduce_scatter_tensor_coalesced([x, 2 * x], "sum", [0, 0], group)
    root = funcol.broadcast(x, 1, group)
    results = [funcol.all_reduce(x, "max", group), gathered, scattered, exchanged, root]
    return [funcol.wait_tensor(y) + 0 for y in (*results, *sums, *gathers, *scatters)]


def compiled() -> Any:
    group = dist.group.WORLD

    def step(x: torch.Tensor) -> torch.Tensor:
        y = funcol.all_gather_tensor(funcol.all_reduce(2 * x, "sum", group) + 1, 0, group)
        return funcol.reduce_scatter_tensor(y, "sum", 0, group) * 1.0

    x = torch.full((4,), float(dist.get_rank()))
    return torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(x), step(x))


def compiled_wrapper() -> Any:
    """Train torch's wrapper, compiled from outside: buckets are rebuilt inside of a forward."""
    wrapper = DistributedDataParallel(model())
    forward = torch.compile(wrapper, backend="aot_eager")
    for step in range(3):
        forward(batch(step, dist.get_rank())).square().mean().backward()
    return [param.grad.clone() for param in wrapper.parameters()]


def checkpointed(directory: str) -> Any:
    net = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net, mesh=mesh)
    before = [whole(p) for p in net.parameters()]
    dcp.save(net.state_dict(), checkpoint_id=f"{directory}/{dist.get_backend()}")
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    state = net.state_dict()
    dcp.load(state, checkpoint_id=f"{directory}/{dist.get_backend()}")
    net.load_state_dict(state)
    after = [whole(p) for p in net.parameters()]
    return [torch.equal(x, y) for x, y in zip(before, after, strict=True)]


@pytest.mark.parametrize(
    "main",
    [fully_sharded, tensor_parallel, sequence_parallel, redistributed, zero_optimizer, functional],
    ids=lambda main: main.__name__,
)
def test_result_is_that_of_gloo(pool: ProcessPool, tmp_path: Path, main: Callable[[], Any]) -> None:
    ours, theirs = both(pool, tmp_path, 2, main)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_tensor_parallel_training_is_that_of_one_process(pool: ProcessPool, tmp_path: Path) -> None:
    net = model()
    losses = train(net, torch.optim.SGD(net.parameters(), lr=0.05))
    expected = (losses, [whole(p) for p in net.parameters()])
    ours = run(pool, tmp_path, 2, tensor_parallel)
    torch.testing.assert_close(ours, [expected, expected], rtol=1e-4, atol=1e-5)


def test_two_mesh_axes_of_four_ranks(pool: ProcessPool, tmp_path: Path) -> None:
    ours, theirs = both(pool, tmp_path, 4, two_axes)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_checkpoint_of_sharded_parameters_is_read_back(pool: ProcessPool, tmp_path: Path) -> None:
    results = run(pool, tmp_path, 2, checkpointed, str(tmp_path))
    assert all(all(equal) for equal in results)


@pytest.mark.proof
def test_a_wrapper_that_is_compiled_from_outside_trains(pool: ProcessPool, tmp_path: Path) -> None:
    ours, theirs = both(pool, tmp_path, 2, compiled_wrapper)
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b)


def test_compiled_regions_give_what_eager_ones_give(pool: ProcessPool, tmp_path: Path) -> None:
    assert run(pool, tmp_path, 2, compiled) == [True, True]
