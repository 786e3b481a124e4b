"""The planner's memory of each ZeRO stage against the bytes that the engines hold at their peak."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn

from braid.comm import Group
from braid.comm.autograd.layer_costs import PeakBytes
from braid.parallel.data_parallel import DistributedDataParallel
from braid.parallel.hybrid import HybridParallel
from braid.parallel.sharding import Sharding, ShardingOptions, attach, memory_of
from braid.plan.described import DescribedMachines
from braid.plan.profiling import MeasuredModel, profile_layers
from braid.plan.search import Estimator, Split, Training
from braid.programs.topology import DEVICES, flat

WIDTH, NUM_LAYERS, BATCH = 64, 8, 512
SPLITS = [
    *(Split(dp=2, shard=shard) for shard in range(4)),
    *(Split(dp=2, shard=shard, microbatches=2) for shard in range(4)),
    Split(pp=2, dp=2, shard=1, microbatches=4),
    Split(pp=2, dp=2, shard=2, microbatches=4),
]


class Stack(nn.Module):
    """Equal layers, each a unit of sharding."""

    def __init__(self) -> None:
        super().__init__()
        linears = [
            (
                nn.utils.skip_init(nn.Linear, WIDTH, 4 * WIDTH),
                nn.utils.skip_init(nn.Linear, 4 * WIDTH, WIDTH),
            )
            for _ in range(NUM_LAYERS)
        ]
        self.layers = nn.ModuleList(nn.Sequential(up, nn.Tanh(), down) for up, down in linears)
        for param in self.parameters():
            nn.init.constant_(param, 1e-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _estimator(num_ranks: int) -> Estimator:
    named = [(str(number), layer) for number, layer in enumerate(copy.deepcopy(Stack()).layers)]
    profile = profile_layers(
        named,
        lambda rows: torch.ones(rows, WIDTH, requires_grad=True),
        model="stack",
        rows=(2, 8),
        seconds=0.0,
    )
    machines = DescribedMachines(flat(num_ranks, 1e-6, 1e9), DEVICES["a100-40gb"])
    return Estimator(MeasuredModel(profile), machines, Training(BATCH))


def _by_address(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({x.data_ptr(): x for x in tensors if x.numel()}.values())


class _Engine(NamedTuple):
    backward: Callable[[], object]
    zero_grad: Callable[[], None]
    sharding: Sharding | None


def _engine(group: Group, split: Split, model: Stack, optimizer: torch.optim.Optimizer) -> _Engine:
    """Return the engine with which `braid train` runs a split."""
    loss, x = nn.functional.mse_loss, torch.ones(BATCH // split.dp, WIDTH)
    if split.mesh:
        hybrid = HybridParallel(
            model,
            split.mesh,
            group,
            layers=list(model.layers),
            num_microbatches=split.microbatches,
            shard=split.shard,
        )
        hybrid.attach(optimizer)
        x *= 1 + hybrid.samples.rank
        return _Engine(partial(hybrid.step, x, x, loss=loss), hybrid.zero_grad, hybrid.sharding)
    x *= 1 + group.rank
    sharding: Sharding | None = None
    wrapped: nn.Module = model
    if split.shard:
        sharding = Sharding(model, group, ShardingOptions(stage=split.shard))
        attach(sharding, optimizer)
    else:
        wrapped = DistributedDataParallel(model, process_group=group)
    zero_grad = optimizer.zero_grad if sharding is None else sharding.zero_grad
    return _Engine(lambda: loss(wrapped(x), x).backward(), zero_grad, sharding)


def _peak_bytes(group: Group, split: Split) -> float:
    """Return the most bytes of tensors that a step holds, after a first one."""
    model = Stack()
    optimizer = torch.optim.Adam(model.parameters())
    backward, zero_grad, sharding = _engine(group, split, model, optimizer)
    backward()
    buckets = [] if split.mesh else [p.grad for p in model.parameters() if p.grad is not None]
    optimizer.step()
    zero_grad()
    if sharding is None:
        kept = [*buckets, *(p for p in model.parameters() if p in optimizer.state)]
    else:
        kept = [x for tensors in memory_of(sharding) for x in tensors]
    states = [x for state in optimizer.state.values() for x in state.values()]
    kept = _by_address([*kept, *states])
    counted = [x for x in kept if x.untyped_storage().resizable()]
    with PeakBytes(counted) as noted:  # which cannot count shared memory
        backward()
        optimizer.step()
    shared = sum(x.nbytes for x in kept) - sum(x.nbytes for x in counted)
    return float(shared + noted.live.peak_bytes)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_memory_of_a_stage_is_the_measured_peak(world, split):
    predicted = _estimator(split.num_ranks).memory(split).nbytes
    measured = max(world(split.num_ranks, _peak_bytes, split))
    # activations and workspace are predicted to peak together, which is up to a twentieth too much
    # here; gradients that are missing or counted twice are at least a tenth
    assert math.isclose(predicted, measured, rel_tol=0.05)
