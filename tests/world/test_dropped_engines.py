"""Engines that were made, used and dropped leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo  # which the first optimizer imports: before objects are hidden from collections
from torch import nn
from training import assert_same, batch, linear, values

import braid
from braid.comm import Group, Request
from braid.comm.channel.channel import Channel
from braid.parallel.hybrid import HybridParallel
from braid.parallel.sharding import Sharding, ShardingOptions, fully_shard, shard_optimizer

SIZE = 2
WARM_UP = 15  # engines until memory is used again: first pages of closed groups rest for a while
# per rank, between two counts: ranks may be one generation apart, and views of shared memory are
# kept for each address. One object for each of the engines would be more
SLACK = {
    "channels": 8,
    "requests": 8,
    "tensors": 80,
    "groups": 8,
    "kib": 80,
    "fds": 4,
    "threads": 2,
}
Use = Callable[[Group, bool], None]


def net() -> nn.Sequential:
    return nn.Sequential(linear(4, 6), nn.Tanh(), linear(6, 2))


def trains(model: nn.Module, optimizer: torch.optim.Optimizer, group: Group) -> None:
    model(batch(group.rank, 0)).square().mean().backward()
    optimizer.step()


def fsdp(group: Group, closes: bool) -> None:
    wrapped = braid.FullyShardedDataParallel(net(), group)
    trains(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), group)
    if closes:
        wrapped.close()
        wrapped.close()


def fsdp2(group: Group, closes: bool) -> None:
    model = net()
    fully_shard(model[0])
    fully_shard(model, process_group=group)
    trains(model, torch.optim.SGD(model.parameters(), lr=0.1), group)
    if closes:
        model.sharding.close()


def zero(group: Group, closes: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shard_optimizer(optimizer, model, stage=2, process_group=group)
    trains(model, optimizer, group)
    if closes:
        engine.close()
        engine.close()
        assert not [name for name in vars(model) if name.startswith("braid")]


def hybrid(mesh: str, shard: int) -> Use:
    def use(group: Group, closes: bool) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = HybridParallel(model, mesh, group, shard=shard)
        engine.attach(optimizer)
        rows = batch(group.rank if "dp" in mesh else 0, 0, rows=4)
        engine.step(rows, torch.ones(4, 2), loss=nn.functional.mse_loss)
        optimizer.step()
        if closes:
            engine.close()
            engine.close()

    return use


USES: dict[str, Use] = {
    "fsdp": fsdp,
    "fully_shard": fsdp2,
    "zero": zero,
    "pp=2": hybrid("pp=2", 0),
    "dp=2": hybrid("dp=2", 0),
    "dp=2 in parts": hybrid("dp=2", 2),
}


def _left(group: Group) -> Counter[str]:
    """What this process has now, and the memory of this rank in use."""
    for _ in range(2):  # a thread does not collect while another one does
        group.barrier()
        gc.collect()
    group.barrier()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        found["channels"] += kind is Channel
        found["requests"] += kind is Request
        found["groups"] += kind is Group
        found["tensors"] += issubclass(kind, torch.Tensor)
    found["kib"] = group.engine.transport.arena.statistics()["used_bytes"] >> 10
    found["fds"] = sum(1 for _ in Path("/proc/self/fd").iterdir())
    found["threads"] = threading.active_count()
    group.barrier()
    return found


def _grown(group: Group, name: str, closes: bool, number: int) -> dict[str, int]:
    """Return what has grown by more than `SLACK` while engines were made and dropped."""
    counts = []
    for more in (WARM_UP, number):
        for _ in range(more):
            USES[name](group, closes)
            gc.collect()
        counts.append(_left(group))
    before, after = counts
    ranks_here = 1 if threading.current_thread() is threading.main_thread() else group.size
    return {
        kind: after[kind] - before[kind]
        for kind, slack in SLACK.items()
        if after[kind] - before[kind] > slack * ranks_here
    }


@pytest.mark.parametrize("closes", [False, True], ids=["dropped", "closed"])
@pytest.mark.parametrize("name", USES)
def test_engines_that_are_gone_leave_nothing(world, name, closes):
    assert world(SIZE, _grown, name, closes, 25) == [{}] * SIZE


@pytest.mark.proof
@pytest.mark.parametrize("name", USES)
def test_hundreds_of_engines_that_are_gone_leave_nothing(procs, name):
    assert procs(SIZE, _grown, name, False, 500) == [{}] * SIZE


class Raises(nn.Module):
    """Passes its input on; its backward raises."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0

        def fail(_grad: torch.Tensor) -> None:
            msg = "in backward"
            raise RuntimeError(msg)

        y.register_hook(fail)
        return y


def _trained_after(group: Group, stage: int, num_dropped: int) -> list[torch.Tensor]:
    """Train after some engines were dropped inside of a forward and backward, with sums under way."""
    for _ in range(num_dropped):
        model = nn.Sequential(linear(4, 6), Raises(), *net())
        model[2] = linear(6, 6)
        options = ShardingOptions(stage=stage, units=[model[2], model[4]])
        engine = Sharding(model, group, options)
        with contextlib.suppress(RuntimeError):
            model(batch(group.rank, 0)).sum().backward()
        del model, engine
        gc.collect()
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    engine = shard_optimizer(optimizer, model, stage=stage, process_group=group)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(group.rank, step)).square().mean().backward()
        optimizer.step()
    engine.undo()
    return values(model)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_was_under_way_in_a_dropped_engine_changes_no_later_one(world, stage):
    for found, expected in zip(
        world(SIZE, _trained_after, stage, 3), world(SIZE, _trained_after, stage, 0), strict=True
    ):
        assert_same(found, expected)
