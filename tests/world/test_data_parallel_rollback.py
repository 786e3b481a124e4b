"""After gradients that are not finite all ranks are where a run without that batch would be, and say so."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from braid.comm import Group
from braid.data_parallel import (
    DistributedDataParallel,
    MixedPrecision,
    NonFiniteError,
    Rollback,
)
from braid.errors import ConfigError

pytestmark = [
    pytest.mark.filterwarnings("ignore:gradients of:RuntimeWarning"),
    # a first batch that is bad: no step has been taken yet
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler:UserWarning"),
]

GOOD = (0, 1, 2, 3, 4, 5)


def net() -> nn.Sequential:
    """With buffers that each forward changes."""
    layers = [nn.utils.skip_init(nn.Linear, 3, 4), nn.utils.skip_init(nn.Linear, 4, 2)]
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in layers:
            for param in layer.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
    return nn.Sequential(layers[0], nn.BatchNorm1d(4), nn.Tanh(), layers[1])


def batch(rank: int, step: int, *, bad: bool) -> torch.Tensor:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * rank + step))
    if bad and rank == 1:
        x[2, 1] = float("nan")
    return x


def cloned(value: Any) -> Any:
    return copy.deepcopy(value)


def _trains(
    group: Group, steps: list[int], bad: list[int], every: int, in_backward: bool = False
) -> tuple[list[Any], list[str]]:
    """State at the end, and what was said."""
    module = net()
    if in_backward:
        rollback = Rollback(module, every=every)
        model = DistributedDataParallel(
            module, process_group=group, nonfinite=rollback, check_all=True
        )
        optimizers = list(
            model.step_in_backward(
                lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
            ).values()
        )
        rollback.keep(*optimizers)
    else:
        optimizers = [torch.optim.Adam(module.parameters(), lr=0.1)]
        rollback = Rollback(module, *optimizers, every=every)
        model = DistributedDataParallel(
            module, process_group=group, nonfinite=rollback, check_all=True
        )
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.7) for one in optimizers]
    rollback.keep(*schedulers)
    said = []
    for step in steps:
        before = rollback.num_rollbacks
        model.zero_grad()
        model(batch(group.rank, step, bad=step in bad)).square().mean().backward()
        if not in_backward:
            optimizers[0].step()
        for scheduler in schedulers:  # goes on after a bad batch, too
            scheduler.step()
        if rollback.num_rollbacks > before:
            said.append(str(rollback.last))
    model(batch(group.rank, 99, bad=False))  # what the last batch left over is undone by now
    state = [
        module.state_dict(),
        [one.state_dict() for one in (*optimizers, *schedulers)],
    ]
    return cloned(state), said


def same(a: Any, b: Any) -> bool:
    """Bit by bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    ("every", "bad", "left"),
    [
        (2, [3], [0, 1, 4, 5]),  # batch 2 came after the copy
        (2, [4], [0, 1, 2, 3, 5]),  # at the copy: nothing is lost
        (100, [0, 4], [5]),  # the copy is that of the start
        (1, [2, 3], [0, 1, 4, 5]),  # two in a row
        (2, [5], [0, 1, 2, 3]),  # the last one
        (2, [3, 5], [0, 1]),  # twice to the same copy, with a good step in between
    ],
)
def test_a_run_with_a_poisoned_batch_equals_one_that_goes_on_from_the_copy(
    world, every, bad, left, in_backward
):
    poisoned = world(2, _trains, list(GOOD), bad, every, in_backward)
    replayed = world(2, _trains, left, [], 1, in_backward)
    for (found, said), (expected, nothing) in zip(poisoned, replayed, strict=True):
        assert same(found, expected)
        assert (len(said), nothing) == (len(bad), [])


def test_all_ranks_say_the_same_step_rank_and_parameter(world):
    first, second = (said for _, said in world(2, _trains, list(GOOD), [3], 2))
    expected = (
        "gradients of '3.bias', '3.weight', '1.bias', '1.weight', '0.bias' and 1 more are NaN or infinite on rank 1 "
        "in step 4: went back to the copy after 2 steps of the optimizer, losing 1 step"
    )
    assert (first, second) == ([expected], [expected])


def _gives_up(group: Group, bad: list[int], limit: int) -> tuple[int, str, bool]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rollback = Rollback(module, optimizer, every=1, limit=limit)
    model = DistributedDataParallel(module, process_group=group, nonfinite=rollback)
    for step in GOOD:
        before = [param.detach().clone() for param in module.parameters()]
        try:
            model(batch(group.rank, step, bad=step in bad)).square().mean().backward()
        except NonFiniteError as error:
            return step, str(error), same(before, list(module.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return -1, "nothing happened", True


@pytest.mark.parametrize(
    ("bad", "limit", "step"), [([1, 2, 3], 2, 3), ([1, 2, 4, 5], 2, -1), ([0, 1], 1, 1)]
)
def test_too_many_returns_in_a_row_are_an_error_on_all_ranks(world, bad, limit, step):
    for found, text, kept in world(2, _gives_up, bad, limit):
        assert (found, kept) == (step, True)
        assert step < 0 or f"expected a good step after {limit} returns" in text


def _accumulates(group: Group, bad: list[int]) -> list[torch.Tensor]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rollback = Rollback(module, optimizer, every=1)
    model = DistributedDataParallel(
        module, process_group=group, nonfinite=rollback, every=2, check_all=True
    )
    for step in range(6):
        model(batch(group.rank, step, bad=step in bad)).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


def test_what_was_accumulated_with_a_bad_batch_is_dropped(world):
    assert not any(param.isnan().any() for found in world(2, _accumulates, [2]) for param in found)


def _replicas(group: Group, bad: list[int]) -> tuple[int, bool]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rollback = Rollback(module, optimizer, every=1)
    model = DistributedDataParallel(
        module,
        device_ids=["cpu", "cpu"],
        process_group=group,
        nonfinite=rollback,
        check_all=True,
    )
    for step in range(4):
        optimizer.zero_grad()
        model(batch(group.rank, step, bad=step in bad)).square().mean().backward()
        optimizer.step()
    return rollback.num_rollbacks, all(
        bool(x.isfinite().all()) for x in model.state_dict().values()
    )


def test_replicas_on_several_devices_go_back_together(world):
    assert world(2, _replicas, [2]) == [(1, True), (1, True)]


def _joins(group: Group) -> tuple[list[Any], int, int]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rollback = Rollback(module, optimizer, every=1, limit=1)
    model = DistributedDataParallel(module, process_group=group, nonfinite=rollback, check_all=True)
    with model.join():
        for step in range(1 if group.rank == 0 else 6):
            optimizer.zero_grad()
            model(batch(group.rank, step, bad=step in {2, 4})).square().mean().backward()
            optimizer.step()
    return cloned(list(module.state_dict().values())), rollback.num_rollbacks, rollback.step


def test_a_rank_without_inputs_does_not_give_up_alone(world):
    (first, *_), (second, *counts) = world(2, _joins)
    assert same(first, second)
    assert all(bool(value.isfinite().all()) for value in second)
    assert counts == [2, 4]


def _in_16_bits(group: Group) -> tuple[int, bool]:
    module = nn.Sequential(nn.utils.skip_init(nn.Linear, 3, 2))
    nn.init.ones_(module[0].weight)
    nn.init.zeros_(module[0].bias)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rollback = Rollback(module, optimizer, every=1)
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    model = DistributedDataParallel(
        module, process_group=group, nonfinite=rollback, check_all=True, mixed_precision=precision
    )
    for step in range(3):
        optimizer.zero_grad()
        before = cloned(list(module.parameters()))
        model(batch(group.rank, step, bad=step == 2)).float().square().mean().backward()
        optimizer.step()
    return rollback.num_rollbacks, same(before, list(module.parameters()))


def test_the_copy_is_of_the_parameters_themselves_where_a_forward_is_in_16_bits(world):
    assert world(2, _in_16_bits) == [(1, True)] * 2


def _warns(group: Group) -> list[str]:
    module = net()
    rollback = Rollback(module, torch.optim.SGD(module.parameters(), lr=0.1))
    model = DistributedDataParallel(module, process_group=group, nonfinite=rollback)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batch(1, 0, bad=True)).sum().backward()
    return [str(one.message) for one in caught]


def test_every_return_is_a_warning(world):
    ((text,),) = world(1, _warns)
    assert "went back to the copy after 0 steps" in text


def test_a_copy_of_the_model_has_no_rollback_and_the_model_can_be_saved():
    module = net()
    rollback = Rollback(module, torch.optim.SGD(module.parameters(), lr=0.1))
    twin = copy.deepcopy(module)
    twin(torch.ones(2, 3))
    assert rollback._copy is None
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    torch.load(file, weights_only=False)(torch.ones(2, 3))
    assert rollback._copy is None
    rollback.close()
    module(torch.ones(2, 3))
    assert rollback._copy is None


@pytest.mark.parametrize(
    ("kept", "options", "words"),
    [
        ([3], {}, "found int"),
        ([[torch.optim.SGD([nn.Parameter(torch.ones(1))])]], {}, "not in a list"),
        ([torch.amp.GradScaler("cpu")], {}, "expected no gradient scaler, found one"),
        ([], {"every": 0}, "every=0"),
        ([], {"limit": 0}, "limit=0"),
    ],
)
def test_what_cannot_be_kept_is_refused(kept, options, words):
    with pytest.raises(ConfigError, match=words):
        Rollback(net(), *kept, **options)


def test_without_an_optimizer_no_step_is_counted():
    module = net()
    held = Rollback(module, every=2)
    with pytest.raises(ConfigError, match="expected an optimizer whose steps are counted"):
        module(torch.ones(2, 3))
    held.close()
