"""Gradients that belong to pieces: a program drops and accumulates them as in one process, or gets an error."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from training import linear, said_by

from braid.comm import Group
from braid.parallel.sharding import Sharding, shard_optimizer

SIZE, STEPS = 2, 6


def model_of() -> nn.Sequential:
    return nn.Sequential(linear(4, 5), nn.Tanh(), linear(5, 4)).double()


def batch_of(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def train(seed: int, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]) -> None:
    """Train by a random program: it accumulates, and drops gradients in any of torch's ways."""
    rng = random.Random(seed)
    for step in range(STEPS):
        numbers = [10 * step + i for i in range(rng.choice([1, 1, 2]))]
        forwards_first = rng.random() < 0.5
        is_frozen = rng.random() < 0.3  # the last layer has no gradient
        for param in model.get_submodule("2").parameters():
            param.requires_grad_(not is_frozen)
        losses: list[torch.Tensor] = []
        for number in numbers:
            for rank in ranks:
                loss = model(batch_of(rank, number)).square().mean() / len(ranks)
                losses.append(loss)
                if not forwards_first:
                    losses.pop().backward()
        for loss in losses:
            loss.backward()
        optimizer.step()
        drop = rng.choice(["optimizer", "model", "parameters", "nothing"])
        if drop == "optimizer":
            optimizer.zero_grad()
        elif drop == "model":
            model.zero_grad()
        elif drop == "parameters":
            for param in model.parameters():
                param.grad = None


def _trained(group: Group, stage: int, seeds: list[int]) -> list[list[torch.Tensor]]:
    found = []
    for seed in seeds:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        engine = shard_optimizer(optimizer, model, process_group=group, stage=stage)
        train(seed, model, optimizer, [group.rank])
        engine.undo()
        found.append([param.detach().clone() for param in model.parameters()])
    return found


@pytest.mark.filterwarnings("ignore:gradients of the last step")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_random_programs_train_as_in_one_process(world, stage):
    seeds = list(range(12))
    ranks = world(SIZE, _trained, stage, seeds)
    for seed in seeds:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        train(seed, model, optimizer, list(range(SIZE)))
        for found in ranks:
            torch.testing.assert_close(found[seed], [p.detach() for p in model.parameters()])


def _in_other_ways(group: Group, stage: int) -> list[str]:
    """Uses of a model between two steps that need no gradients."""
    x = batch_of(group.rank, 0)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shard_optimizer(optimizer, model, process_group=group, stage=stage)
    params = list(model.parameters())
    seen = []

    def step(between: Callable[[], object]) -> None:
        model(x).square().mean().backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([param.detach().clone() for param in params])

    step(lambda: model.to("cpu"))
    step(model.double)
    step(lambda: model.zero_grad(set_to_none=False))
    step(lambda: torch.autograd.grad(model(x).sum(), params))
    step(lambda: torch.no_grad()(model)(x))
    first, *_ = params

    def drop_after_grad() -> None:
        torch.autograd.grad(model(x).sum(), params)
        for param in params:
            if param.grad is not None:
                param.grad = None

    before = [param.detach().clone() for param in params]
    step(drop_after_grad)
    assert all(map(torch.equal, before, seen[-1]))
    assert not torch.equal(seen[0][0], seen[1][0])
    assert all(map(torch.equal, seen[1], seen[2]))  # dropped
    engine.undo()
    return [f"{first.grad}"]


@pytest.mark.parametrize("stage", [1, 2])
def test_moved_gradients_do_not_stop_uses_that_need_no_gradients(world, stage):
    assert world(SIZE, _in_other_ways, stage) == [["None"]] * SIZE


def _uses(group: Group, stage: int) -> list[str]:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine: Sharding = shard_optimizer(optimizer, model, process_group=group, stage=stage)
    model(batch_of(group.rank, 0)).sum().backward()
    param = next(model.parameters())
    moved = param.grad
    assert moved is not None
    assert moved.shape == param.shape
    assert moved.dtype == torch.float64
    assert repr(moved) == "<gradient of 0.weight, stored in pieces>"

    def set_grad() -> None:
        param.grad = torch.ones_like(param)
        optimizer.step()

    said = [
        said_by(call)
        for call in (
            moved.norm,
            lambda: moved.mul_(0.5),
            lambda: torch.stack([moved.detach()]),
            lambda: torch.isnan(moved).any(),
            lambda: copy.deepcopy(moved),
            lambda: moved + 1,
            set_grad,
        )
    ]
    engine.undo()
    assert param.grad is not moved
    return said


@pytest.mark.parametrize("stage", [1, 2])
def test_each_use_of_a_moved_gradient_is_an_error(world, stage):
    for *used, set_by_hand in world(SIZE, _uses, stage):
        for text in used:
            assert text.startswith("ConfigError: the gradient of 0.weight is stored in pieces")
        assert "'0.weight' has a gradient that this step would not use" in set_by_hand


def _compiled(group: Group) -> list[torch.Tensor]:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shard_optimizer(optimizer, model, process_group=group, stage=2)
    call = torch.compile(model, backend="eager")
    for number, rows in enumerate((2, 3)):  # another length compiles again
        call(batch_of(group.rank, number)[:rows]).square().mean().backward()
        optimizer.step()
    engine.undo()
    return [param.detach().clone() for param in model.parameters()]


def test_a_compiled_model_may_be_compiled_again_after_a_step(procs):
    first, second = procs(SIZE, _compiled)
    torch.testing.assert_close(first, second)
