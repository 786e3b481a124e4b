"""Hooks that count steps, resumed on more ranks than their state is of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from braid.comm import Group
from braid.errors import CommError, ConfigError
from braid.parallel.data_parallel import (
    DistributedDataParallel,
    PostLocalSGDHook,
    PowerSGDHook,
    PowerSGDOptions,
)

WIDTH = 12
SEPARATE = 1e-5  # MiB: a bucket for each parameter


def _model() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(
        nn.utils.skip_init(nn.Linear, WIDTH, 2 * WIDTH), nn.utils.skip_init(nn.Linear, 24, WIDTH)
    )
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=generator) * 0.3
    return model


def _hook(kind: str) -> Any:
    options = PowerSGDOptions(rank=2, start=2)
    return PowerSGDHook(options) if kind == "powersgd" else PostLocalSGDHook(2)


def _trained(
    group: Group, kind: str, states: dict[int, Any], steps: range, cap_mb: float = 25.0
) -> tuple[Any, list[torch.Tensor]]:
    """The state of the hook, and the last gradients."""
    model = _model()
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap_mb)
    wrapped.register_comm_hook(None, _hook(kind))
    if group.rank in states:
        wrapped.load_hook_state(copy.deepcopy(states[group.rank]))
    for step in steps:
        wrapped.zero_grad()
        generator = torch.Generator().manual_seed(100 * group.rank + step)
        wrapped(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
    return wrapped.hook_state(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("cap_mb", [25.0, SEPARATE])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_new_rank_goes_on_with_the_steps_and_q_of_the_others(world, steps, cap_mb):
    told = world(2, _trained, "powersgd", {}, range(steps), cap_mb)
    states = {rank: state for rank, (state, _) in enumerate(told)}
    found = world(3, _trained, "powersgd", states, range(steps, steps + 2), cap_mb)
    # what a new rank would have been given by hand: steps and Q, and nothing that it owes
    given = copy.deepcopy(states[0])
    given["hook"]["error"] = {}
    expected = world(3, _trained, "powersgd", {**states, 2: given}, range(steps, steps + 2), cap_mb)
    for (state, gradients), (wanted, exact) in zip(found, expected, strict=True):
        assert state["hook"]["steps"] == wanted["hook"]["steps"]
        assert all(map(torch.equal, gradients, exact))
        assert all(map(torch.equal, gradients, found[0][1]))


def test_a_new_rank_among_the_first_ones_goes_on_with_the_others(world):
    told = world(2, _trained, "powersgd", {}, range(3))
    states = {rank + 1: state for rank, (state, _) in enumerate(told)}
    found = world(3, _trained, "powersgd", states, range(3, 4))
    assert all(map(torch.equal, found[0][1], found[2][1]))
    assert set(found[0][0]["hook"]["steps"].values()) == {4}


def test_a_new_rank_averages_no_gradients_where_the_others_have_ended_that(world):
    told = world(2, _trained, "post-local", {}, range(3))
    states = {rank: state for rank, (state, _) in enumerate(told)}
    found = world(3, _trained, "post-local", states, range(3, 4))
    assert set(found[2][0]["hook"]["steps"].values()) == {4}
    assert not torch.equal(found[0][1][0], found[2][1][0])


def _goes_on_in_a_larger_group(group: Group, kind: str) -> list[torch.Tensor]:
    hook = _hook(kind)
    pair = group.split(0 if group.rank < 2 else None)
    model = _model()
    for members, steps in ((pair, range(3)), (group, range(3, 4))):
        if members is None:
            continue
        wrapped = DistributedDataParallel(model, process_group=members)
        wrapped.register_comm_hook(None, hook)
        for step in steps:
            wrapped.zero_grad()
            generator = torch.Generator().manual_seed(100 * group.rank + step)
            wrapped(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
    counts = torch.tensor(list(hook.state_dict()["steps"].values()))
    return [*(p.grad.clone() for p in model.parameters()), counts]


def test_a_hook_that_goes_to_a_larger_group_agrees_with_who_is_there(world):
    first, *others = world(3, _goes_on_in_a_larger_group, "powersgd")
    for other in others:
        assert all(map(torch.equal, first, other))


def _of_different_steps(group: Group, kind: str, states: dict[int, Any]) -> str:
    try:
        _trained(group, kind, states, range(1))
    except ConfigError as found:
        return str(found)
    except CommError as found:  # of the rank that was first
        return str(found)
    return ""


@pytest.mark.parametrize(
    ("kind", "name"), [("powersgd", "powersgd"), ("post-local", "PostLocalSGDHook")]
)
def test_states_of_different_steps_are_refused_by_the_name_of_the_hook(world, kind, name):
    early = world(2, _trained, kind, {}, range(1))[0][0]
    late = world(2, _trained, kind, {}, range(3))[1][0]
    for text in world(3, _of_different_steps, kind, {0: early, 1: late}):
        assert f"the state of {name} belongs to different steps on different ranks" in text
        assert "1 on rank 0, 3 on rank 1, 0 on rank 2" in text
