"""Divided layers, parameters and sequences on a device, beside one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gpu_models import STEPS, lost, mlp, rows, trained_alone
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import braid
from braid.comm import Group
from braid.parallel.context_parallel import context_parallel, gather_sequence, split_sequence
from braid.parallel.sharding import CPUOffloadPolicy, MixedPrecisionPolicy, shard_optimizer


def _divided(group: Group, device: str, by_graph: bool) -> list[torch.Tensor]:
    model = mlp(device)
    if by_graph:
        plan = {"0": ((1, 1), (2, 1)), "2": ((1, 2), (1, 2))}
        braid.parallelize(model, group, plan, inputs=rows(device, 0).requires_grad_())
    else:
        braid.parallelize(model, group, {"0": "column", "2": "row"})
    return _with_gradient(model, device)


def _with_gradient(model: nn.Module, device: str) -> list[torch.Tensor]:
    x = rows(device, 0).requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return [y.detach().cpu(), x.grad.cpu()]


@pytest.mark.parametrize("by_graph", [False, True], ids=["by_modules", "by_graph"])
def test_divided_layers_have_output_and_gradient_of_whole_ones(procs, device, by_graph):
    expected = _with_gradient(mlp(device), device)
    for found in procs(2, _divided, device, by_graph):
        assert lost(found, expected) < 1e-5


def _sharded(group: Group, device: str, stage: int) -> list[torch.Tensor]:
    model = mlp(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    engine = shard_optimizer(optimizer, model, stage=stage, process_group=group)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(rows(device, 10 * step + group.rank)).square().mean().backward()
        optimizer.step()
    engine.undo()
    return [param.detach().cpu() for param in model.parameters()]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_training_is_that_of_one_process(procs, device, stage):
    expected = trained_alone(device, partial(torch.optim.Adam, lr=0.1))
    for found in procs(2, _sharded, device, stage):
        assert lost(found, expected) < 1e-4


def _mixed(group: Group, device: str, reduce: torch.dtype, offloads: bool) -> list[torch.Tensor]:
    model = mlp(device)
    wrapped = braid.FullyShardedDataParallel(
        model,
        group,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce),
        offload_policy=CPUOffloadPolicy(pin_memory=device == "cuda") if offloads else None,
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(rows(device, 10 * step + group.rank)).float().square().mean().backward()
        optimizer.step()
    with wrapped.sharding.gathered():
        return [param.detach().float().cpu().clone() for param in model.parameters()]


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offloads", [False, True], ids=["here", "offloaded"])
def test_parameters_in_parts_train_in_bfloat16(procs, device, reduce, offloads):
    expected = trained_alone(device, partial(torch.optim.SGD, lr=0.1))
    for found in procs(2, _mixed, device, reduce, offloads):
        assert lost(found, expected) < 0.05


class Attention(nn.Module):
    """Causal attention over a sequence; heads are 8 wide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def _ring(group: Group, device: str) -> torch.Tensor:
    model = Attention().to(device)
    x = torch.randn(2, 32, 16, generator=torch.Generator().manual_seed(1)).to(device)
    with context_parallel(model, group, inputs={}):
        own = model(split_sequence(group.size, group.rank, x))
    whole = gather_sequence(group, own)
    return whole.detach().cpu()


def test_ring_attention_has_the_output_of_the_whole_sequence(procs, device):
    x = torch.randn(2, 32, 16, generator=torch.Generator().manual_seed(1)).to(device)
    expected = Attention().to(device)(x).detach()
    for found in procs(2, _ring, device):
        assert lost([found], [expected]) < 1e-5
