"""What is converted or moved after wrapping stays right, or is refused with what to do."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.data_parallel import AveragingOptimizer, DistributedDataParallel, accumulate
from support.seeded import filled


def net() -> nn.Sequential:
    layers = [nn.utils.skip_init(nn.Conv2d, 2, 3, 2), nn.utils.skip_init(nn.Linear, 4, 2)]
    return filled(nn.Sequential(layers[0], nn.Flatten(2), layers[1]), 5)


def loss_of(module: nn.Module, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(3, 2, 3, 3, generator=torch.Generator().manual_seed(10 * rank + step))
    return module(x.to(dtype)).square().mean()


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [param.grad.clone() for param in module.parameters()]


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "double": lambda m: m.double(),
    "one layer": lambda m: getattr(m, "module", m)[2].double(),
}


def _converts(group: Group, how: str, trained: bool, by_optimizer: bool) -> str:
    module = net()
    if by_optimizer:
        model: nn.Module = module
        optimizer = AveragingOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.1),
            module.named_parameters(),
            process_group=group,
        )
    else:
        model = DistributedDataParallel(module, process_group=group)
    if trained:
        loss_of(model, group.rank, 0, torch.float32).backward()
    CONVERSIONS[how](model)
    try:
        if by_optimizer:
            optimizer.zero_grad()
        else:
            model(torch.ones(1, 2, 3, 3))
    except ConfigError as error:
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize("by_optimizer", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("how", list(CONVERSIONS))
def test_a_conversion_after_wrapping_is_refused_when_training_goes_on(
    world, how, trained, by_optimizer
):
    dtype = {"half": "float16", "bfloat16": "bfloat16"}.get(how, "float64")
    for text in world(2, _converts, how, trained, by_optimizer):
        assert f"'2.weight', float32 on cpu then and {dtype} on cpu now" in text
        assert "before wrapping" in text
        assert ("'0.weight'" in text) == (how != "one layer")


HARMLESS: dict[str, Callable[[nn.Module], object]] = {
    "device": lambda m: m.to("cpu"),
    "dtype": lambda m: m.float(),
    "state": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict())),
    "there and back": lambda m: m.double().float(),
    "module there and back": lambda m: getattr(m, "module", m).double().float(),
    "format": lambda m: m.to(memory_format=torch.channels_last),
    "format and back": lambda m: m.to(memory_format=torch.channels_last).to(
        memory_format=torch.contiguous_format
    ),
}


def _goes_on(group: Group, how: str, by_optimizer: bool, zeroes: bool) -> list[list[torch.Tensor]]:
    module = net()
    if by_optimizer:
        model: nn.Module = module
        plain = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer = AveragingOptimizer(plain, process_group=group)
    else:
        model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=1e-5)
        optimizer = model
    found = []
    for step in range(3):
        loss_of(model, group.rank, step, torch.float32).backward()
        found.append(grads(module))
        HARMLESS[how](model)
        optimizer.zero_grad(set_to_none=not zeroes)
    return found


@pytest.mark.parametrize("zeroes", [False, True])
@pytest.mark.parametrize("by_optimizer", [False, True])
@pytest.mark.parametrize("how", list(HARMLESS))
def test_what_is_the_same_again_goes_on_being_averaged(world, how, by_optimizer, zeroes):
    module = net()
    expected = []
    for step in range(3):
        accumulate(
            module, [lambda r=r, s=step: loss_of(module, r, s, torch.float32) for r in range(2)]
        )
        expected.append(grads(module))
    for found in world(2, _goes_on, how, by_optimizer, zeroes):
        for own, others in zip(found, expected, strict=True):
            for a, b in zip(own, others, strict=True):
                torch.testing.assert_close(a, b)


def _averaged(group: Group) -> tuple[bool, bool]:
    wrapped = DistributedDataParallel(net(), process_group=group)
    averaged = torch.optim.swa_utils.AveragedModel(wrapped.module)
    loss_of(wrapped, group.rank, 0, torch.float32).backward()
    twin = copy.deepcopy(wrapped.module)
    torch.save(wrapped.module, file := io.BytesIO())
    averaged.update_parameters(wrapped.module)
    before = grads(wrapped.module)
    loss_of(twin, group.rank, 1, torch.float32).backward()  # this rank's own
    alone = net()
    loss_of(alone, group.rank, 1, torch.float32).backward()
    file.seek(0)
    loss_of(torch.load(file, weights_only=False), group.rank, 1, torch.float32).backward()
    return (
        all(map(torch.equal, grads(twin), grads(alone))),
        all(map(torch.equal, before, grads(wrapped.module))),
    )


def test_copies_of_the_module_are_free_of_the_wrapper(world):
    assert world(2, _averaged) == [(True, True)] * 2
