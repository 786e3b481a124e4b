"""Objects of a scope that are hard to copy or to follow, each beside OneDeviceStrategy."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from braid.errors import ConfigError
from braid.strategies import (
    OneDeviceStrategy,
    PerReplica,
    Strategy,
    get_replica_context,
)

WIDTH = 4


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 1)


Made = tuple[Callable[[torch.Tensor], torch.Tensor], nn.Module, torch.optim.Optimizer]


def trained(strategy: Strategy, make: Callable[[], Made], sizes: tuple[int, ...]) -> list:
    """Return the parameters after a step for each size."""
    with strategy.scope():
        call, model, optimizer = make()

    def step(x: torch.Tensor) -> None:
        def loss_of() -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(call(x), x.float().sum(1, keepdim=True))
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(loss_of)
        else:
            loss_of()
            optimizer.step()

    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(0, 5, (size, WIDTH), generator=generator) for size in sizes]
    for batch in strategy.experimental_distribute_dataset(data):
        strategy.run(step, args=(batch,))
    return [param.detach() for param in model.parameters()]


def tied_layers() -> Made:
    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    params = [*first.parameters(), second.bias]
    both = nn.ModuleList([first, second])
    return (
        lambda x: second(first(x.float())).mean(1, keepdim=True),
        both,
        torch.optim.SGD(params, lr=0.01),
    )


def searching() -> Made:
    model = linear()
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    return lambda x: model(x.float()), model, optimizer


def sparse() -> Made:
    torch.manual_seed(0)
    model = nn.Embedding(5, 1, sparse=True)
    return lambda x: model(x).sum(1), model, torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.mark.parametrize("make", [tied_layers, searching, sparse])
def test_shares_of_different_sizes_give_the_parameters_of_one_device(mirrored, make):
    expected = trained(OneDeviceStrategy(), make, (6, 5, 7))
    for found, param in zip(trained(mirrored, make, (6, 5, 7)), expected, strict=True):
        torch.testing.assert_close(found, param, rtol=1e-4, atol=1e-4)


class Configured(nn.Module):
    """Has attributes of all kinds that `forward` reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.scale = torch.ones(1)
        self.factors = [1.0, {"last": torch.ones(1)}]
        self.options = SimpleNamespace(power=1)
        self.array = np.ones(1)
        self.extra = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        factors: Any = self.factors
        scale = self.scale * factors[0] * factors[1]["last"] * float(self.array[0])
        return x * scale**self.options.power * getattr(self, "extra", 10.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.scale.fill_(3.0),
        lambda model: model.scale.data.fill_(3.0),
        lambda model: model.factors.__setitem__(0, 3.0),
        lambda model: model.factors[1]["last"].fill_(3.0),
        lambda model: setattr(model.options, "power", 3.0),
        lambda model: model.array.fill(3.0),
        lambda model: delattr(model, "extra"),
    ],
)
def test_attributes_that_are_changed_in_place_reach_all_replicas(mirrored, change):
    with mirrored.scope():
        model = Configured()

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    values = PerReplica([torch.ones(1), torch.full((1,), 2.0)])
    mirrored.run(step, args=(values,))
    change(model)
    first, second = mirrored.run(step, args=(values,)).values
    assert (2 * first).item() == second.item()
    assert first.item() == model(torch.ones(1)).item()


def test_a_hook_that_an_optimizer_gets_between_steps_is_called_in_all_replicas(mirrored):
    with mirrored.scope():
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()

    mirrored.run(step)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    mirrored.run(step)
    assert len(calls) == 2


def test_a_function_of_the_same_source_with_another_model_is_checked(mirrored):
    with mirrored.scope():
        inside = linear()
    outside = linear()

    def step_of(model: nn.Module) -> Callable[[], None]:
        return lambda: model(torch.ones(1, WIDTH)).sum().backward()

    mirrored.run(step_of(inside))
    with pytest.raises(ConfigError, match="which was not made in this strategy's scope"):
        mirrored.run(step_of(outside))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def add(self, x: torch.Tensor) -> None:
        self.count += x


def test_buffers_of_a_part_that_was_kept_are_refused(mirrored):
    with mirrored.scope():
        part = Counts()
        model = nn.ModuleList([part])
    values = PerReplica([torch.ones(()), torch.ones(())])
    with pytest.raises(ConfigError, match=r"replica 1 uses 0\.count of replica 0: inside"):
        mirrored.run(part.add, args=(values,))
    part.count.zero_()

    def step(x: torch.Tensor) -> None:
        model[0].add(x)

    mirrored.run(step, args=(values,))
    assert part.count.item() == 1.0


def test_results_in_structures_are_reduced_one_by_one(mirrored):
    found = mirrored.reduce("mean", {"a": PerReplica([1, 2.5]), "b": (PerReplica([1.0, 3.0]),)})
    assert found == {"a": 1.75, "b": (2.0,)}


def lazy() -> nn.Module:
    return nn.LazyLinear(1)


def compiled() -> nn.Module:
    return torch.compile(linear(), backend="eager")


def old_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(linear())


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lazy, "weight has no shape yet: call the lazy module once with an example input"),
        (compiled, "OptimizedModule is compiled for one copy of its parameters, and 2 replicas"),
        (old_norm, "Linear cannot be copied for another replica: Only Tensors created explicitly"),
    ],
)
def test_modules_that_cannot_be_copied_are_refused(mirrored, make, problem):
    with mirrored.scope():
        model = make()
    with pytest.raises(ConfigError, match=problem):
        mirrored.run(lambda: model(torch.ones(1, WIDTH)))


def test_one_replica_runs_a_compiled_module():
    strategy = OneDeviceStrategy()
    with strategy.scope():
        model = compiled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    strategy.run(step, args=(torch.ones(1, WIDTH),))
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def test_learning_rates_that_differ_between_replicas_are_refused(mirrored):
    with mirrored.scope():
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.param_groups[0]["lr"] = 1.0 + get_replica_context().replica_id_in_sync_group

    with pytest.raises(ConfigError, match="options of SGD differ between replicas after this step"):
        mirrored.run(step)
