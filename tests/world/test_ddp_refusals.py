"""DistributedDataParallel says on all ranks what cannot be right."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch import nn
from training import (
    Gradients,
    Net,
    batch,
    grads,
    loss_of,
    said_by,
)

from braid.comm import Group
from braid.errors import ConfigError, MismatchError
from braid.parallel.data_parallel import DistributedDataParallel, NonFiniteError

# What must be refused, or be told.


def _grad(group: Group) -> tuple[str, bool]:
    wrapped = DistributedDataParallel(Net(), process_group=group, find_unused_parameters=True)
    loss = loss_of(wrapped(batch(group.rank, 0)))
    text = said_by(lambda: torch.autograd.grad(loss, list(wrapped.parameters())), ConfigError)
    x = batch(group.rank, 0).requires_grad_()
    (by_input,) = torch.autograd.grad(wrapped(x).sum(), x, create_graph=True)
    by_input.square().sum().backward()  # a gradient penalty: its own graph, averaged as any other
    return text, wrapped.module.first.weight.grad is not None


def test_autograd_grad_of_parameters_is_refused_and_that_of_inputs_is_not(world):
    for text, penalized in world(2, _grad):
        assert "torch.autograd.grad of 'first.weight' returns" in text
        assert "loss.backward()" in text
        assert penalized


def _spoils(group: Group, nonfinite: str, check_all: bool) -> tuple[str, bool]:
    net = Net()
    wrapped = DistributedDataParallel(
        net, process_group=group, nonfinite=nonfinite, check_all=check_all
    )

    def step() -> None:
        x = batch(group.rank, 0)
        found = wrapped(x)
        weights = torch.ones_like(found)
        if group.rank == 1:
            weights[0, 1] = float("inf")
        (found * weights).sum().backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = said_by(step, NonFiniteError)
    return " ".join([said, *(str(one.message) for one in caught)]), net.first.bias.grad is None


@pytest.mark.parametrize(
    ("nonfinite", "check_all", "dropped"), [("raise", True, False), ("skip", False, True)]
)
def test_gradients_that_are_not_finite_are_told_on_all_ranks(procs, nonfinite, check_all, dropped):
    for text, is_dropped in procs(2, _spoils, nonfinite, check_all):
        assert is_dropped == dropped
        first = "'third.bias', 'third.weight', 'second.bias'" if check_all else "'second.bias'"
        assert f"gradients of {first}" in text  # of one number of each fewer are seen
        assert "on rank 1 in step 1" in text


def _takes_remarks_for_errors(group: Group, nonfinite: object) -> tuple[str, bool]:
    net = Net()
    net.third.unused = nn.Parameter(torch.ones(1))
    wrapped = DistributedDataParallel(net, process_group=group, nonfinite=nonfinite)
    said = ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "gradients of", RuntimeWarning)  # on all ranks
        try:
            (loss_of(wrapped(batch(group.rank, 0))) * float("nan")).backward()
        except (UserWarning, NonFiniteError) as error:
            said = str(error)
    return said, net.first.weight.grad is None


def test_a_remark_that_is_an_error_takes_nothing_away_from_what_is_done_about_nan(procs):
    def raised(nonfinite):
        return procs(2, _takes_remarks_for_errors, nonfinite)

    (said, skipped), (nothing, also) = raised("skip")
    assert "got no gradient on any rank" in said
    assert (skipped, nothing, also) == (True, "", True)
    for said, _ in raised("raise"):
        assert "NaN or infinite on" in said


def _loses_a_batch(group: Group, where: str) -> list[str]:
    net = Net()
    wrapped = DistributedDataParallel(net, process_group=group)
    said = []
    for step in range(4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lost = (group.rank, step) == (1, 1)
            if lost and where == "forward":
                with pytest.raises(RuntimeError, match="shapes"):
                    wrapped(batch(group.rank, step)[:, 1:])
                continue
            found = wrapped(batch(group.rank, step))
            if lost:
                continue  # its loss has raised
            loss_of(found).backward()
        said += [str(one.message) for one in caught]
        if group.rank == 2:  # of these nobody has to know
            net.requires_grad_(False)
            wrapped(batch(group.rank, step))
            net.requires_grad_(True)
            with torch.no_grad():
                wrapped(batch(group.rank, step))
        if group.rank != 1 and step == 2:
            break  # rank 1 has taken as many steps
    return said


@pytest.mark.parametrize("where", ["forward", "loss"])
def test_a_rank_that_goes_on_to_its_next_batch_alone_is_told(procs, where):
    (text,), *others = procs(3, _loses_a_batch, where)
    assert "forwards without a backward in step 2: 1 on rank 1. If" in text
    assert others == [[], []]


def _takes_pieces(group: Group, together: bool) -> Gradients:
    """Ranks divide batches into as many pieces as they like, or episodes end when they end."""
    net = Net().double()
    wrapped = DistributedDataParallel(net, process_group=group)
    count = 2 + group.rank
    losses = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(wrapped.no_sync())
        for step in range(count):
            if step == count - 1:
                stack.close()
            loss = loss_of(wrapped(batch(group.rank, step).double())) / count
            if together:
                losses.append(loss)
            else:
                loss.backward()
    if together:
        torch.stack(losses).sum().backward()
    return grads(net)


@pytest.mark.parametrize("together", [False, True])
def test_ranks_may_take_their_batches_in_different_numbers_of_pieces(world, together):
    net = Net().double()
    for rank in range(3):
        for step in range(2 + rank):
            (loss_of(net(batch(rank, step).double())) / (2 + rank) / 3).backward()
    for found in world(3, _takes_pieces, together):
        for a, b in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(a, b.grad)


def _drifts(group: Group) -> str:
    net = Net()
    wrapped = DistributedDataParallel(net, process_group=group, hash_every=2)
    loss_of(wrapped(batch(0, 0))).backward()
    if group.rank == 2:
        with torch.no_grad():
            net.second.weight[0, 0] += 1e-3
    return said_by(lambda: loss_of(wrapped(batch(0, 0))).backward(), MismatchError)


def test_a_parameter_that_drifts_is_named_with_its_rank(world):
    for text in world(3, _drifts):
        assert "second.weight on rank 2" in text
        assert "step 2" in text
