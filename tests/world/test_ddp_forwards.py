"""Checkpointed, frozen and repeated forwards leave the gradients of the ordered loop in one process."""

from __future__ import annotations

import random

import pytest
import torch
from training import (
    SMALL,
    Gradients,
    Net,
    assert_same,
    batch,
    grads,
    loss_of,
    said_by,
)

from braid.comm import Group
from braid.errors import MismatchError
from braid.parallel.data_parallel import DistributedDataParallel, accumulate

CHOICES = random.Random(3).choices(range(32), k=60)  # what is trained, as bits


# Checkpointing, frozen parameters, several forwards.


def _checkpointed(group: Group, reentrant: bool, twice: bool, static: bool) -> list[Gradients]:
    net = Net()
    wrapped = DistributedDataParallel(
        net, process_group=group, bucket_cap_mb=SMALL, static_graph=static
    )
    found = []
    for step in range(3):
        wrapped.zero_grad()
        x = batch(group.rank, step).requires_grad_()
        loss_of(wrapped(x, reentrant=reentrant, twice=twice)).backward()
        found.append(grads(net))
    return found


@pytest.mark.parametrize(
    ("reentrant", "twice", "static"),
    [(False, False, False), (False, True, False), (True, False, False), (True, True, True)],
)
def test_activations_may_be_checkpointed_both_ways(world, reentrant, twice, static):
    net = Net()
    for found in world(2, _checkpointed, reentrant, twice, static):
        for step, after in enumerate(found):
            accumulate(
                net, [lambda r=r, s=step: loss_of(net(batch(r, s), twice=twice)) for r in range(2)]
            )
            for a, b in zip(after, grads(net), strict=True):
                if reentrant and twice:  # parts of a gradient are added in another order there
                    torch.testing.assert_close(a, b)
                else:
                    assert torch.equal(a, b)


def _unfreezes(group: Group, unfreeze: bool) -> list[Gradients]:
    net = Net()
    net.second.requires_grad_(False)
    wrapped = DistributedDataParallel(net, process_group=group, bucket_cap_mb=SMALL)
    found = []
    for step in range(3):
        if step == 1:
            net.second.requires_grad_(unfreeze)
            net.first.weight.requires_grad_(not unfreeze)
        wrapped.zero_grad()
        loss_of(wrapped(batch(group.rank, step))).backward()
        found.append(grads(net))
    return found


def test_parameters_that_are_unfrozen_and_frozen_after_wrapping_are_followed(world):
    net = Net()
    net.second.requires_grad_(False)
    expected = []
    for step in range(3):
        if step == 1:
            net.second.requires_grad_(True)
            net.first.weight.requires_grad_(False)
            net.first.weight.grad = None
        accumulate(net, [lambda r=r, s=step: loss_of(net(batch(r, s))) for r in range(2)])
        expected.append(grads(net))
    for found in world(2, _unfreezes, True):
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)


def _alternates(group: Group) -> tuple[list[Gradients], int]:
    net = Net()
    wrapped = DistributedDataParallel(
        net, process_group=group, bucket_cap_mb=SMALL, find_unused_parameters=True
    )
    found, plans = [], []
    for step in range(6):
        net.first.requires_grad_(step % 2 == 0)
        net.second.requires_grad_(step % 2 == 1)
        net.zero_grad()
        loss_of(wrapped(batch(group.rank, step))).backward()
        found.append(grads(net))
        plans.append(wrapped._reducer.buckets)
    return found, len({id(plan) for plan in plans[2:]})


def test_plans_of_a_program_that_freezes_in_turns_are_kept(world):
    net, expected = Net(), []
    for step in range(6):
        net.first.requires_grad_(step % 2 == 0)
        net.second.requires_grad_(step % 2 == 1)
        net.zero_grad()
        accumulate(net, [lambda r=r, s=step: loss_of(net(batch(r, s))) for r in range(2)])
        expected.append(grads(net))
    for found, num_plans in world(2, _alternates):
        assert num_plans == 2
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)


def _trains_at_random(group: Group) -> tuple[list[Gradients], int, int]:
    net = Net()
    wrapped = DistributedDataParallel(
        net, process_group=group, bucket_cap_mb=SMALL, find_unused_parameters=True
    )
    found = []
    for step in range(60):
        for number, param in enumerate(net.parameters()):
            param.requires_grad_(number == 5 or bool(CHOICES[step] >> number & 1))
        net.zero_grad()
        loss_of(wrapped(batch(group.rank, step))).backward()
        found.append(grads(net))
    kept = wrapped._reducer._averager._cache._kept
    return found, len(kept), group.persistent("all_reduce", torch.ones(1))._number


def test_plans_that_do_not_come_back_give_their_channels_to_later_ones(world):
    net, expected = Net(), []
    for step in range(60):
        for number, param in enumerate(net.parameters()):
            param.requires_grad_(number == 5 or bool(CHOICES[step] >> number & 1))
        net.zero_grad()
        accumulate(net, [lambda r=r, s=step: loss_of(net(batch(r, s))) for r in range(2)])
        expected.append(grads(net))
    for found, num_kept, channel in world(2, _trains_at_random):
        assert num_kept <= 4
        assert (
            channel <= 7 * 6
        )  # what is kept, the one of now, one that is made and one that goes; six buckets each
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)


def _freezes_while_accumulating(group: Group) -> Gradients:
    net = Net()
    wrapped = DistributedDataParallel(
        net, process_group=group, bucket_cap_mb=SMALL, gradient_accumulation_steps=2
    )
    for step in range(2):
        net.first.requires_grad_(step == 0)
        loss_of(wrapped(batch(group.rank, step))).backward()
    return grads(net)


def test_what_was_accumulated_of_parameters_that_are_frozen_then_is_averaged(world):
    net = Net()
    for step in range(2):
        net.first.requires_grad_(step == 0)
        for rank in range(2):
            (loss_of(net(batch(rank, step))) / 2).backward()
    for found in world(2, _freezes_while_accumulating):
        for a, b in zip(found, grads(net), strict=True):
            torch.testing.assert_close(a, b)


def _looks_alone(group: Group, looks: bool) -> tuple[list[Gradients], int]:
    """Rank 1 runs the model with other parameters frozen, several times, of which the others know nothing."""
    net = Net()
    wrapped = DistributedDataParallel(net, process_group=group, bucket_cap_mb=SMALL)
    found = []
    for step in range(4):
        for frozen in (net.first, net.second, net.first) if looks and group.rank == 1 else ():
            frozen.requires_grad_(False)
            wrapped(batch(1, 9))
            frozen.requires_grad_(True)
            if step % 2:
                wrapped(batch(1, 9))
        net.third.requires_grad_(step < 2)
        wrapped.zero_grad()
        loss_of(wrapped(batch(group.rank, step))).backward()
        found.append(grads(net))
    return found, group.persistent("all_reduce", torch.ones(1))._number


@pytest.mark.filterwarnings("ignore:.*ran forwards without a backward:UserWarning")
def test_a_rank_may_look_at_something_with_frozen_parameters_by_itself(world):
    for (found, number), (expected, other) in zip(
        world(2, _looks_alone, True), world(2, _looks_alone, False), strict=True
    ):
        assert number == other
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)


def _unfreezes_alone(group: Group) -> str:
    net = Net()
    net.second.requires_grad_(False)
    wrapped = DistributedDataParallel(net, process_group=group)
    if group.rank == 1:
        net.second.bias.requires_grad_(True)
    return said_by(lambda: loss_of(wrapped(batch(0, 0))).backward(), MismatchError)


def test_one_rank_that_unfreezes_a_parameter_is_told_on_all(world):
    for text in world(3, _unfreezes_alone):
        assert "'second.bias' requires a gradient on 1 of 3 ranks" in text


def _two_forwards(group: Group) -> Gradients:
    net = Net()
    wrapped = DistributedDataParallel(net, process_group=group, bucket_cap_mb=SMALL)
    wrapped(batch(group.rank, 9))  # no backward ever follows
    total = loss_of(wrapped(batch(group.rank, 0))) + loss_of(wrapped(batch(group.rank, 1)))
    total.backward()
    return grads(net)


def test_several_forwards_may_come_before_a_backward_and_one_without(world):
    net = Net()
    accumulate(
        net,
        [lambda r=r: loss_of(net(batch(r, 0))) + loss_of(net(batch(r, 1))) for r in range(2)],
    )
    for found in world(2, _two_forwards):
        assert_same(found, grads(net))
