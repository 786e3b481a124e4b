"""Accumulation, weights and uneven inputs leave the gradients of the ordered loop in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training import (
    SMALL,
    Gradients,
    Net,
    assert_same,
    batch,
    grads,
    linear,
    loss_of,
    said_by,
)

from braid.comm import Group
from braid.errors import CommError
from braid.parallel.data_parallel import DistributedDataParallel

# Accumulation and weights.


def _every(group: Group) -> list[Gradients]:
    net = Net()
    wrapped = DistributedDataParallel(net, process_group=group, gradient_accumulation_steps=3)
    found = []
    for step in range(6):
        if step % 3 == 0:
            wrapped.zero_grad()
        loss_of(wrapped(batch(group.rank, step))).backward()
        if step % 3 == 2:
            found.append(grads(net))
    return found


def test_every_third_backward_averages_what_three_have_accumulated(world):
    net = Net()
    expected = []
    for start in (0, 3):
        own = []
        for rank in range(2):
            net.zero_grad()
            for step in range(start, start + 3):
                loss_of(net(batch(rank, step))).backward()
            own.append(grads(net))
        expected.append([(a + b) / 2 for a, b in zip(*own, strict=True)])
    for found in world(2, _every):
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)


def _backward_inside_no_sync(group: Group) -> bool:
    net = Net()
    wrapped = DistributedDataParallel(net, process_group=group)
    loss = loss_of(wrapped(batch(group.rank, 0)))
    with wrapped.no_sync():
        loss.backward()
    local = Net()
    loss_of(local(batch(group.rank, 0))).backward()
    return all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(net.parameters(), local.parameters(), strict=True)
    )


def test_no_sync_follows_the_backward_not_the_forward(world):
    assert world(2, _backward_inside_no_sync) == [True, True]


ROWS = (5, 2, 0)  # of the batches of rank 0, 1, 2


def _weighted(group: Group) -> Gradients:
    net = Net().double()
    wrapped = DistributedDataParallel(net, process_group=group, gradient_accumulation_steps=2)
    for step in range(2):
        rows = ROWS[group.rank] + step
        wrapped.set_loss_weight(rows)
        found = wrapped(batch(group.rank, step, rows).double())
        (loss_of(found) if rows else found.sum()).backward()
    return grads(net)


def test_weights_make_uneven_batches_equal_to_one_batch_of_one_process(world):
    net = Net().double()
    together = torch.cat([batch(r, s, ROWS[r] + s) for s in range(2) for r in range(3)])
    loss_of(net(together.double())).backward()
    for found in world(3, _weighted):
        for a, b in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(a, b.grad)


def _weighted_after_freezing(group: Group, way: str) -> Gradients:
    net = Net().double()
    wrapped = DistributedDataParallel(net, process_group=group, find_unused_parameters=True)
    rows = ROWS[group.rank]
    if way == "another part is trained":
        for part in (net.second, net.third):
            part.requires_grad_(False)
        loss_of(wrapped(batch(9, 0).double())).backward()
        net.requires_grad_(True)
        net.first.requires_grad_(False)
        wrapped.set_loss_weight(rows)
    else:
        wrapped.set_loss_weight(rows)
        net.requires_grad_(False)
        wrapped(batch(9, 0).double())
        net.requires_grad_(True)
    net.zero_grad()
    loss_of(wrapped(batch(group.rank, 0, rows).double())).backward()
    return grads(net)


@pytest.mark.parametrize("way", ["another part is trained", "all were frozen in a forward"])
def test_weights_hold_for_what_is_unfrozen_later(world, way):
    net = Net().double()
    net.first.requires_grad_(way != "another part is trained")
    loss_of(net(torch.cat([batch(r, 0, ROWS[r]) for r in range(2)]).double())).backward()
    for found in world(2, _weighted_after_freezing, way):
        for a, b in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(a, b.grad)


# Uneven inputs.

BATCHES = (4, 1, 2)


def _uneven(group: Group, by_all: bool) -> tuple[list[torch.Tensor], list[int]]:
    net = Net()
    wrapped = DistributedDataParallel(net, process_group=group, bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = group.statistics()["num_operations"]
    with wrapped.join(divide_by_initial_world_size=by_all):
        for step in range(BATCHES[group.rank]):
            optimizer.zero_grad()
            loss_of(wrapped(batch(group.rank, step))).backward()
            optimizer.step()
    after = group.statistics()["num_operations"]
    return [p.detach().clone() for p in net.parameters()], [after - before]


@pytest.mark.parametrize("by_all", [True, False])
def test_ranks_without_inputs_help_the_others_until_all_are_through(world, by_all):
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(max(BATCHES)):
        working = [rank for rank in range(3) if step < BATCHES[rank]]
        optimizer.zero_grad()
        for rank in working:
            loss = loss_of(net(batch(rank, step).double()))
            (loss / (3 if by_all else len(working))).backward()
        optimizer.step()
    for found, _ in world(3, _uneven, by_all):
        for a, b in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach().float())


def _uneven_every(group: Group, sparse: bool) -> list[torch.Tensor]:
    net, wrapped, optimizer = _accumulating(sparse, group)
    with wrapped.join():
        for step in range((4, 3, 1)[group.rank]):
            loss_of(wrapped(_input(sparse, group.rank, step))).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


def _accumulating(
    sparse: bool, group: Group | None
) -> tuple[nn.Module, nn.Module, torch.optim.SGD]:
    table = nn.Embedding(7, 4, sparse=True, _weight=linear(4, 7).weight.detach())
    net = nn.Sequential(table, Net()) if sparse else Net()
    wrapped = (
        net
        if group is None
        else DistributedDataParallel(
            net, process_group=group, bucket_cap_mb=SMALL, gradient_accumulation_steps=2
        )
    )
    return net, wrapped, torch.optim.SGD(net.parameters(), lr=0.1)


def _input(sparse: bool, rank: int, step: int) -> torch.Tensor:
    return torch.tensor([rank, step, 3]) if sparse else batch(rank, step)


@pytest.mark.parametrize("sparse", [False, True])
def test_what_a_rank_has_accumulated_when_its_input_ends_takes_part(world, sparse):
    net, _, optimizer = _accumulating(sparse, None)
    for taking_part in [[(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)], [(0, 2), (0, 3), (1, 2)]]:
        optimizer.zero_grad()
        for rank, step in taking_part:
            (loss_of(net(_input(sparse, rank, step))) / 3).backward()
        optimizer.step()
    for found in world(3, _uneven_every, sparse):
        for a, b in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach())


def _throws(group: Group) -> str:
    wrapped = DistributedDataParallel(Net(), process_group=group)

    def train() -> None:
        with wrapped.join(throw_on_early_termination=True):
            for step in range(BATCHES[group.rank]):
                loss_of(wrapped(batch(group.rank, step))).backward()

    return said_by(train, CommError)


def test_a_rank_without_input_can_be_an_error_on_all(world):
    assert all("a rank has no more input" in text for text in world(2, _throws))
