"""A gradient that is None in one process is None with every engine: the optimizer's state rests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from training import linear

from braid import FullyShardedDataParallel, ps
from braid.comm import Group
from braid.parallel.data_parallel import DistributedDataParallel
from braid.parallel.expert_parallel import average_gradients
from braid.parallel.hybrid import HybridParallel
from braid.parallel.pipeline import Pipeline
from braid.parallel.sharding import shard_optimizer

RANKS, STEPS, ROWS, WIDTH = 2, 3, 4, 4
ADAMW = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.5)


class Layer(nn.Module):
    """Uses one linear layer always, one where a row of the batch asks for it, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.used = linear(WIDTH, WIDTH)
        self.sometimes = linear(WIDTH, WIDTH)
        self.never = linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + torch.tanh(self.used(x))
        if bool((x[:, 0] > 0).any()):
            y = y + self.sometimes(x)
        return torch.cat([x[:, :1], y[:, 1:]], dim=1)


def model() -> nn.Sequential:
    layers = nn.Sequential(*(Layer() for _ in range(4))).double()
    layers[3].never.weight = layers[0].never.weight  # on both ranks of a pipeline
    return layers


def batch(rank: int, step: int) -> torch.Tensor:
    """Rows of a rank; those of one rank ask for more in the first step, and none in the second."""
    rows = torch.randn(
        ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64
    )
    rows[:, 0] = float((step, rank) in {(0, 1), (2, 0)}) - 0.5
    return rows


def whole_batch(step: int) -> torch.Tensor:
    return torch.cat([batch(rank, step) for rank in range(RANKS)])


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def backward(net: Any, rank: int, step: int) -> None:
    x = batch(rank, step)
    loss_of(net(x), x).backward()


def steps_of(optimizer: torch.optim.Optimizer, step: Callable[[int], None]) -> None:
    for number in range(STEPS):
        step(number)
        optimizer.step()
        optimizer.zero_grad()


def one_process() -> dict[str, torch.Tensor]:
    net = model()
    optimizer = ADAMW(net.parameters())

    def step(number: int) -> None:
        for rank in range(RANKS):
            x = batch(rank, number)
            (loss_of(net(x), x) / RANKS).backward()

    steps_of(optimizer, step)
    return named(net)


def named(net: nn.Module) -> dict[str, torch.Tensor]:
    every = net.named_parameters(remove_duplicate=False)
    return {name: param.detach().clone() for name, param in every}


def data_parallel(group: Group) -> Any:
    net = model()
    wrapped = DistributedDataParallel(net, process_group=group, find_unused_parameters=True)
    steps_of(ADAMW(net.parameters()), partial(backward, wrapped, group.rank))
    return named(net)


def fully_sharded(group: Group) -> Any:
    net = FullyShardedDataParallel(model(), group)
    optimizer = ADAMW(net.parameters())
    steps_of(optimizer, partial(backward, net, group.rank))
    return {name: value.clone() for name, value in net.state_dict().items()}


def sharded(group: Group, stage: int) -> Any:
    net = model()
    optimizer = ADAMW(net.parameters())
    engine = shard_optimizer(optimizer, net, stage=stage, process_group=group)
    steps_of(optimizer, partial(backward, net, group.rank))
    with engine.gathered():
        return named(net)


def pipeline(group: Group, schedule: str) -> Any:
    net = Pipeline(model(), num_microbatches=RANKS, schedule=schedule, group=group)

    def step(number: int) -> None:
        x = whole_batch(number)
        net.step(x, x, loss=loss_of)

    steps_of(ADAMW(net.parameters()), step)
    return named(net)


def replicated_pipeline(group: Group, shard: int) -> Any:
    net = model()
    optimizer = ADAMW(net.parameters())
    hybrid = HybridParallel(
        net, "dp=2", group, layers=list(net), num_microbatches=1, schedule="1f1b", shard=shard
    )
    hybrid.attach(optimizer)

    def step(number: int) -> None:
        hybrid.zero_grad()
        x = batch(group.rank, number)
        hybrid.step(x, x, loss=loss_of)

    steps_of(optimizer, step)
    hybrid.make_whole()
    return named(net)


def with_experts(group: Group) -> Any:
    net = model()

    def step(number: int) -> None:
        backward(net, group.rank, number)
        average_gradients(net, group)

    steps_of(ADAMW(net.parameters()), step)
    return named(net)


def parameter_server(group: Group, where: str, partition_bytes: int) -> Any:
    with ps.join(group, 1) as node:
        net = ps.ParameterServer(model(), node, ADAMW, where=where, partition_bytes=partition_bytes)
        if not node.is_worker:
            node.serve()
            return None
        for number in range(STEPS):
            backward(net, node.number, number)
            net.step()
        return named(net.module)


ENGINES: dict[str, Callable[[Group], Any]] = {
    "data parallel": data_parallel,
    "fully sharded": fully_sharded,
    **{f"stage {stage}": partial(sharded, stage=stage) for stage in (1, 2)},
    **{f"pipeline {name}": partial(pipeline, schedule=name) for name in ("1f1b", "zb_h1")},
    **{f"hybrid {shard}": partial(replicated_pipeline, shard=shard) for shard in (0, 1, 2)},
    "experts": with_experts,
    **{
        f"servers, {where} step, {size} bytes": partial(
            parameter_server, where=where, partition_bytes=size
        )
        for where in ("servers", "workers")
        for size in (100, 1 << 20)
    },
}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_no_rank_uses_stays_as_in_one_process(world, engine):
    expected = one_process()
    untouched = named(model())
    assert torch.equal(expected["1.never.weight"], untouched["1.never.weight"])
    ranks = RANKS + 2 if engine.startswith("servers") else RANKS
    found: dict[str, torch.Tensor] = {}
    for own in world(ranks, ENGINES[engine]):
        found |= {name.removeprefix("module."): x for name, x in (own or {}).items()}
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
