"""Optimizers whose steps are taken inside of backward step with averages, or are refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_ddp_second_order import SMALL, batch, grads, net
from torch import nn
from training import said_by

from braid.comm import Group
from braid.errors import CommError, ConfigError
from braid.parallel.data_parallel import DistributedDataParallel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch uses what it deprecates itself
    from torch.distributed.optim import _apply_optimizer_in_backward

LR = {"lr": 0.1}


def values(module: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in module.parameters()]


def _expected(size: int, steps: int) -> list[torch.Tensor]:
    module = net()
    optimizer = torch.optim.Adam(module.parameters(), **LR)
    for step in range(steps):
        optimizer.zero_grad()
        sum(module(batch(rank, step)).square().mean() / size for rank in range(size)).backward()
        optimizer.step()
    return values(module)


def _applied(group: Group, when: str) -> list[torch.Tensor]:
    module = net()
    if when == "before wrapping":
        _apply_optimizer_in_backward(torch.optim.Adam, module.parameters(), LR)
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=SMALL)
    if when == "after wrapping":
        _apply_optimizer_in_backward(torch.optim.Adam, module.parameters(), LR)
    for step in range(3):
        model(batch(group.rank, step)).square().mean().backward()
        assert all(param.grad is None for param in model.parameters())
    return values(model)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
def test_optimizers_that_torch_applies_in_backward_step_with_averages(world, when, size):
    expected = _expected(size, 3)
    for found in world(size, _applied, when):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


def _some(group: Group) -> tuple[list[bool], str, str]:
    module = net()
    _apply_optimizer_in_backward(torch.optim.SGD, [module[0].weight], LR)
    model = DistributedDataParallel(module, process_group=group)
    with model.no_sync():  # as torch: no step, gradients accumulate
        model(batch(group.rank, 0)).square().mean().backward()
    assert module[0].weight.grad is not None
    before = values(model)
    model(batch(group.rank, 1)).square().mean().backward()
    changed = [not torch.equal(a, b) for a, b in zip(before, values(model), strict=True)]
    assert [param.grad is None for param in module.parameters()] == [True, False, False, False]
    twice = said_by(lambda: model.step_in_backward(lambda p: torch.optim.SGD(p, **LR)), ConfigError)
    table = nn.Embedding(4, 2, sparse=True, _weight=torch.ones(4, 2))
    _apply_optimizer_in_backward(torch.optim.SGD, table.parameters(), LR)
    sparse = DistributedDataParallel(table, process_group=group)
    return changed, twice, said_by(lambda: sparse(torch.tensor([1])), ConfigError)


def test_some_parameters_have_optimizers_in_backward(world):
    for changed, twice, sparse in world(2, _some):
        assert changed == [True, False, False, False]
        assert "would be updated twice" in twice
        assert "'weight' has an optimizer in backward, but sparse gradients" in sparse


def _stepping(optimizers: dict[nn.Parameter, torch.optim.Optimizer]) -> Callable[[Any], None]:
    def step(param: nn.Parameter) -> None:  # as torch's tutorial has it
        optimizers[param].step()
        optimizers[param].zero_grad()

    return step


FIX = "use model.step_in_backward(lambda params: torch.optim.SGD(params, lr=...))"


def _hooked(group: Group, when: str, guilty: int | None) -> str:
    module = net()
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in module.parameters()}
    handles = []

    def register() -> None:
        if guilty in {None, group.rank}:
            hook = _stepping(optimizers)
            handles.extend(p.register_post_accumulate_grad_hook(hook) for p in module.parameters())

    if when == "before wrapping":
        register()
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=SMALL)
    if when == "after wrapping":
        register()
    loss = model(batch(group.rank, 0)).square().mean()
    text = said_by(loss.backward, (ConfigError, CommError))
    for handle in handles:
        handle.remove()
    model.zero_grad()
    model(batch(group.rank, 1)).square().mean().backward()  # others have learnt of it
    assert len(grads(model)) == 4
    return text


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("guilty", [None, 1])
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
@pytest.mark.filterwarnings("ignore:.* parameters differ between ranks")
def test_steps_in_hooks_of_the_program_are_refused_on_all_ranks(world, when, guilty, size):
    texts = world(size, _hooked, when, guilty)
    for rank, text in enumerate(texts):
        cause = rank if guilty is None else guilty
        assert f"Error: rank {cause}: gradient" in text
        assert "set to None inside of backward, before the average over ranks" in text
        assert FIX in text
