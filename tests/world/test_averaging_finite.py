"""NaN on one rank is told by rank and parameter before averaging makes it everybody's."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from training import said_by

from braid.comm import Group
from braid.errors import ConfigError, MismatchError
from braid.parallel.data_parallel import (
    DiLoCo,
    HierarchicalModelAverager,
    NonFiniteError,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
)


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def _averaged(averager: Any, params: list[nn.Parameter]) -> PostLocalSGDOptimizer:
    return PostLocalSGDOptimizer(_sgd(params), averager)


def _periodic(params: list[nn.Parameter], group: Group, **options: Any) -> Any:
    return _averaged(PeriodicModelAverager(2, 1, group, **options), params)


def _hierarchical(params: list[nn.Parameter], group: Group, **options: Any) -> Any:
    sizes = {1: 1, 2: group.size}
    return _averaged(HierarchicalModelAverager(sizes, 1, group, **options), params)


def _diloco(params: list[nn.Parameter], group: Group, **options: Any) -> Any:
    return DiLoCo(_sgd(params), period=2, lr=1.0, momentum=0.0, process_group=group, **options)


MAKERS = {"periodic": _periodic, "hierarchical": _hierarchical, "diloco": _diloco}


def _spoiled(
    group: Group, kind: str, options: dict[str, Any], steps: int, bad: float = math.nan
) -> tuple[list[tuple[str, str]], list[float]]:
    """What each step says, and the parameter that rank 1 spoils in step 1."""
    params = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2, 3))]
    optimizer = MAKERS[kind](params, group, **options)
    told = []
    for step in range(steps):
        for param in params:
            param.grad = torch.full_like(param, -1.0)
        if group.rank == 1 and step == 1:
            params[1].grad[1, 1] = bad
        try:
            optimizer.step()
        except NonFiniteError as found:
            told.append((type(found).__name__, str(found)))
    return told, params[1].flatten().tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["periodic", "diloco"])
def test_raise_names_rank_and_parameter_on_all_ranks_and_leaves_the_others_theirs(world, kind, bad):
    told = world(3, _spoiled, kind, {"nonfinite": "raise"}, 2, bad)
    for rank, (((name, text),), values) in enumerate(told):
        assert name == "NonFiniteError"
        assert "NaN or infinity in parameter 1 of shape [2, 3] on rank 1" in text
        assert f"in step {1 + (kind == 'diloco')} of " in text
        assert all(math.isfinite(value) for value in values) == (rank != 1)
        assert values[0] == 2.0


def _warned(group: Group, kind: str) -> tuple[list[tuple[str, str]], list[float]]:
    """As `_spoiled`, by default: what is warned of, and the parameter."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        told, values = _spoiled(group, kind, {}, 6)
    return told + [(one.category.__name__, str(one.message)) for one in said], values


@pytest.mark.procs
@pytest.mark.parametrize("kind", MAKERS)
def test_by_default_it_is_a_warning_that_is_given_once(procs, kind):
    for ((name, text),), values in procs(3, _warned, kind):
        assert name == "RuntimeWarning"
        assert "of shape [2, 3] on rank 1 in step" in text
        assert "nonfinite='raise' stops before that" in text
        assert math.isnan(values[4])
        assert math.isfinite(values[0])


@pytest.mark.parametrize("kind", MAKERS)
def test_who_ignores_it_is_told_nothing(world, kind):
    for told, values in world(2, _spoiled, kind, {"nonfinite": "ignore"}, 4):
        assert told == []
        assert math.isnan(values[4])


@pytest.mark.procs
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_formats_on_a_network_do_not_hide_it(hosts, wire):
    for ((_, text),), _ in hosts(3, _spoiled, "diloco", {"nonfinite": "raise", "wire": wire}, 2):
        assert "of shape [2, 3] on rank 1 in step 2 of DiLoCo" in text


def _after(group: Group) -> list[float]:
    """Rank 1 takes what rank 0 has, and all go on."""
    params = [nn.Parameter(torch.zeros(2))]
    optimizer = _diloco(params, group, nonfinite="raise")
    for step in range(4):
        params[0].grad = torch.full((2,), -1.0)
        if group.rank == 1 and step == 1:
            params[0].grad[0] = math.nan
        try:
            optimizer.step()
        except NonFiniteError:
            with torch.no_grad():
                group.broadcast(params[0], 0)
    return params[0].tolist()


def test_training_goes_on_when_the_rank_has_good_parameters_again(world):
    assert world(2, _after) == [[4.0, 4.0]] * 2


def _differing(group: Group, kind: str) -> str:
    params = [nn.Parameter(torch.zeros(2))]
    try:
        optimizer = MAKERS[kind](params, group, nonfinite="ignore" if group.rank else "warn")
        for _ in range(2):
            optimizer.step()
    except MismatchError as found:
        return str(found)
    return ""


@pytest.mark.parametrize("kind", MAKERS)
def test_reactions_that_differ_between_ranks_are_shown(world, kind):
    for text in world(2, _differing, kind):
        assert "rank 0  nonfinite='warn'" in text
        assert "rank 1  nonfinite='ignore'" in text


def _overflown(group: Group) -> str:
    param = nn.Parameter(torch.full((2,), 3e38))
    return said_by(
        lambda: PeriodicModelAverager(2, 0, group, nonfinite="raise").average_parameters([param]),
        NonFiniteError,
    )


def test_large_numbers_are_no_infinities(world):
    assert world(1, _overflown) == ["nothing happened"]  # though their sum is
    for text in world(2, _overflown):
        assert "the average is not finite although the parameters of every rank are" in text


def _refused(group: Group, kind: str) -> str:
    return said_by(
        lambda: MAKERS[kind]([nn.Parameter(torch.zeros(2))], group, nonfinite="explode"),
        ConfigError,
    )


@pytest.mark.parametrize("kind", MAKERS)
def test_another_reaction_is_refused(world, kind):
    assert "choose one of 'ignore', 'warn', 'raise'" in world(1, _refused, kind)[0]
