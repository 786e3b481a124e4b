"""Gradients with a graph of their own: averages are differentiated as those of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training import said_by

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.data_parallel import DistributedDataParallel
from support.seeded import filled

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
SMALL = 1e-5  # a bucket for each parameter


def net() -> nn.Sequential:
    layers = [nn.utils.skip_init(nn.Linear, 3, 4), nn.utils.skip_init(nn.Linear, 4, 2)]
    return filled(nn.Sequential(layers[0], nn.Tanh(), layers[1]), 5)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * rank + step))


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [param.grad.detach().clone() for param in module.parameters()]


def penalty(module: nn.Module) -> torch.Tensor:
    return sum(param.grad.square().sum() for param in module.parameters())


def _penalized(group: Group, zeroes: bool, steps: int) -> list[list[torch.Tensor]]:
    model = DistributedDataParallel(
        net(), process_group=group, bucket_cap_mb=SMALL, gradient_accumulation_steps=1
    )
    found = []
    for step in range(steps):
        model.zero_grad()
        model(batch(group.rank, step)).square().mean().backward(create_graph=True)
        assert all(param.grad.grad_fn is not None for param in model.parameters())
        found.append(grads(model))
        loss = penalty(model)
        if zeroes:
            model.zero_grad()
        loss.backward()
        found.append(grads(model))
    model.zero_grad()  # a gradient with a graph and its parameter hold each other
    return found


def _one_process(size: int, zeroes: bool, steps: int) -> list[list[torch.Tensor]]:
    module = net()
    found = []
    for step in range(steps):
        module.zero_grad()
        losses = [module(batch(rank, step)).square().mean() for rank in range(size)]
        (sum(losses) / size).backward(create_graph=True)
        found.append(grads(module))
        loss = penalty(module)
        if zeroes:
            module.zero_grad()
        loss.backward()
        found.append(grads(module))
    module.zero_grad()
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("zeroes", [False, True])
def test_a_penalty_on_averaged_gradients_has_the_gradients_of_one_process(world, size, zeroes):
    expected = _one_process(size, zeroes, 2)
    for found in world(size, _penalized, zeroes, 2):
        for own, others in zip(found, expected, strict=True):
            for a, b in zip(own, others, strict=True):
                torch.testing.assert_close(a, b)


def _local(group: Group) -> bool:
    model = DistributedDataParallel(net(), process_group=group)
    alone = net()
    alone(batch(group.rank, 0)).square().mean().backward(create_graph=True)
    with model.no_sync():
        model(batch(group.rank, 0)).square().mean().backward(create_graph=True)
    same = all(map(torch.equal, grads(model), grads(alone)))
    has_graph = all(param.grad.grad_fn is not None for param in model.parameters())
    model.zero_grad()
    alone.zero_grad()
    return same and has_graph


def test_gradients_that_stay_local_keep_their_graph(world):
    assert world(2, _local) == [True] * 2


def _refused(group: Group) -> tuple[str, str]:
    model = DistributedDataParallel(net(), process_group=group)
    model.set_loss_weight(3)
    loss = model(batch(group.rank, 0)).square().mean()
    weighted = said_by(lambda: loss.backward(create_graph=True), ConfigError)
    model.zero_grad()
    sparse = nn.Embedding(4, 2, sparse=True, _weight=torch.ones(4, 2))
    model = DistributedDataParallel(sparse, process_group=group)
    loss = (model(torch.tensor([1, 2])) ** 3).sum()
    text = said_by(lambda: loss.backward(create_graph=True), ConfigError)
    model.zero_grad()
    return weighted, text


@pytest.mark.parametrize("size", [2, 3])
def test_graphs_that_cannot_be_averaged_are_refused_by_name(world, size):
    for rank, (weighted, sparse) in enumerate(world(size, _refused)):
        assert "'0.weight' has a graph of its own" in weighted or "'2.bias' has" in weighted
        assert "set_loss_weight(None)" in weighted
        assert sparse.startswith(f"ConfigError: rank {rank}: gradient of 'weight' is sparse and")
        assert sparse.endswith("use sparse=False")
