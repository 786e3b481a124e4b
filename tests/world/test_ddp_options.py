"""Every option of DistributedDataParallel leaves what the ordered loop in one process leaves, or says why not."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from braid.comm import Group
from braid.data_parallel import DistributedDataParallel, MixedPrecision, NonFiniteError, accumulate
from braid.errors import BraidError, CommError, ConfigError, MismatchError

PAIRS = 32 / (1 << 20)  # MiB: two parameters of 4 numbers in a bucket
SMALL = 1e-5  # MiB: every parameter in a bucket of its own
CHOICES = random.Random(3).choices(range(32), k=60)  # what is trained, as bits
Gradients = list["torch.Tensor | None"]


def linear(width: int, out: int) -> nn.Linear:
    """With numbers that leave torch's default generator alone."""
    layer = nn.utils.skip_init(nn.Linear, width, out)
    generator = torch.Generator().manual_seed(width * out)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
    return layer


class Net(nn.Module):
    """Layers that can be used twice, checkpointed, and in an order other than that of registration."""

    def __init__(self, *, swapped: bool = False) -> None:
        super().__init__()
        self.first = linear(4, 6)
        self.second = linear(6, 6)
        self.third = linear(6, 2)
        self.swapped = swapped
        self.scale = 2.0

    def forward(
        self, x: torch.Tensor, *, reentrant: bool | None = None, twice: bool = False
    ) -> torch.Tensor:
        def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            if reentrant is None:
                return torch.tanh(layer(x))
            found: torch.Tensor = checkpoint(
                lambda x: torch.tanh(layer(x)), x, use_reentrant=reentrant
            )
            return found

        hidden = run(self.second, run(self.first, x))
        if twice:
            hidden = run(self.second, hidden)
        return self.third(hidden)


def batch(rank: int, step: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(50 * rank + step))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def grads(module: nn.Module) -> Gradients:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_same(found: Gradients, expected: Gradients) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert torch.equal(a, b), (a, b)


def said_by(
    call: Callable[[], object],
    kind: type[BaseException] | tuple[type[BaseException], ...] = BraidError,
) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing happened"


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


# Buckets.


class Crossed(nn.Module):
    """Gradients come in another order than registration says."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (5, 1, 4, 0, 3, 2):  # gradients come in the reverse order
            x = torch.tanh(x * self.weights[number])
        return x


def _crossed(group: Group) -> tuple[list[tuple[int, ...]], Gradients]:
    net = Crossed()
    wrapped = DistributedDataParallel(net, process_group=group, bucket_cap_mb_list=[PAIRS])
    for step in range(2):
        wrapped.zero_grad()
        wrapped(batch(group.rank, step)).sum().backward()
    return [bucket.layout.members for bucket in wrapped._reducer.buckets], grads(net)


def test_buckets_are_planned_anew_in_the_order_in_which_gradients_came(world):
    net = Crossed()
    accumulate(net, [lambda r=r: net(batch(r, 1)).sum() for r in range(2)])
    for members, found in world(2, _crossed):
        assert members == [(2, 3), (0, 4), (1, 5)]
        assert_same(found, grads(net))


def _delays(group: Group) -> tuple[list[bool], Gradients]:
    net = Net()
    wrapped = DistributedDataParallel(
        net,
        process_group=group,
        delay_all_reduce_named_params=[("third.weight", net.third.weight)],
        param_to_hook_all_reduce=net.first.weight,
        find_unused_parameters=True,
    )
    loss_of(wrapped(batch(group.rank, 0))).backward()
    return [bucket.layout.delayed for bucket in wrapped._reducer.buckets], grads(net)


def test_delayed_parameters_have_a_bucket_of_their_own(world):
    net = Net()
    accumulate(net, [lambda r=r: loss_of(net(batch(r, 0))) for r in range(2)])
    for delayed, found in world(2, _delays):
        assert delayed == [False, True]
        assert_same(found, grads(net))


def _ignores(group: Group) -> bool:
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["third.weight"])
    wrapped = DistributedDataParallel(net, process_group=group)
    loss_of(wrapped(batch(group.rank, 0))).backward()
    own = Net()
    loss_of(own(batch(group.rank, 0))).backward()
    return torch.equal(net.third.weight.grad, own.third.weight.grad)


def test_ignored_parameters_keep_their_own_gradients(world):
    assert world(2, _ignores) == [True, True]


def _embeds(group: Group, tied: bool) -> Gradients:
    embed = nn.Embedding(7, 3, sparse=True, _weight=linear(3, 7).weight.detach())
    net = nn.Sequential(embed, linear(3, 2))
    wrapped = DistributedDataParallel(net, process_group=group)
    tokens = torch.tensor([[group.rank, 3, 3], [5, group.rank, 6]])
    wrapped(tokens[: 2 if group.rank != 1 else 1]).square().sum().backward()
    assert embed.weight.grad.is_sparse
    return [embed.weight.grad.to_dense(), *grads(net[1])]


def test_sparse_gradients_are_averaged_by_rows_and_stay_sparse(world):
    embed = nn.Embedding(7, 3, _weight=linear(3, 7).weight.detach())
    net = nn.Sequential(embed, linear(3, 2))

    def loss(rank: int) -> torch.Tensor:
        tokens = torch.tensor([[rank, 3, 3], [5, rank, 6]])
        return net(tokens[: 2 if rank != 1 else 1]).square().sum()

    accumulate(net, [lambda r=r: loss(r) for r in range(3)])
    for found in world(3, _embeds, False):
        assert_same(found, grads(net))


# Hooks.


def _hooked(group: Group, kind: str) -> tuple[str, Gradients]:
    net = Net()
    wrapped = DistributedDataParallel(net, process_group=group, bucket_cap_mb=SMALL)

    def hook(state, bucket):
        assert state == "state"
        if kind == "generator":
            return steps(bucket)
        if kind == "work":
            return group.all_reduce(bucket.buffer(), "avg", async_op=True)
        average = group.all_reduce(bucket.buffer().clone(), "avg")
        if kind == "shape":
            average = average[:1]
        if kind == "nothing":
            return None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(average)
        return future

    def steps(bucket):
        yield group.all_reduce(bucket.buffer(), async_op=True)
        bucket.set_buffer(bucket.buffer() / group.size)

    wrapped.register_comm_hook("state", hook)
    said = said_by(lambda: loss_of(wrapped(batch(group.rank, 0))).backward(), ConfigError)
    return said, grads(net)


@pytest.mark.parametrize("kind", ["future", "work", "generator"])
def test_a_hook_takes_the_place_of_the_all_reduce(world, kind):
    net = Net()
    accumulate(net, [lambda r=r: loss_of(net(batch(r, 0))) for r in range(2)])
    for said, found in world(2, _hooked, kind):
        assert said == "nothing happened"
        for a, b in zip(found, grads(net), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("shape", "numbers, got shape"), ("nothing", "returned NoneType")],
)
def test_a_hook_that_answers_something_else_is_told_so(world, kind, words):
    for said, _ in world(1, _hooked, kind):
        assert words in said


def _hook_raises(group: Group, late: bool) -> str:
    wrapped = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=SMALL)

    def fails(bucket):
        if group.rank == 1 and bucket.index() == 2:
            msg = "no space left"
            raise OSError(msg)

    def hook(_state, bucket):
        if not late:
            fails(bucket)
        return steps(bucket)

    def steps(bucket):
        yield group.all_reduce(bucket.buffer(), async_op=True)
        if late:
            fails(bucket)
        yield group.all_reduce(bucket.buffer(), async_op=True)

    wrapped.register_comm_hook(None, hook)
    return said_by(lambda: loss_of(wrapped(batch(group.rank, 0))).backward(), (BraidError, OSError))


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_that_raises_on_one_rank_is_told_on_all(world, late):
    first, own, third = world(3, _hook_raises, late)
    assert own == "no space left"
    for text in (first, third):
        assert "rank 1: the communication hook _hook_raises.<locals>.hook for GradBucket(2:" in text
        assert "raised OSError: no space left" in text


# Precision, passing through, saving.


def _mixed(group: Group) -> tuple[list[str], Gradients]:
    net = Net()
    wrapped = DistributedDataParallel(
        net, process_group=group, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    )
    found = wrapped(batch(group.rank, 0))
    found.float().square().mean().backward()
    return [str(found.dtype), str(net.first.weight.dtype)], grads(net)


def test_forward_in_16_bits_leaves_gradients_in_32(world):
    def loss(net: Net, rank: int) -> torch.Tensor:
        low = copy.deepcopy(net).bfloat16()
        low(batch(rank, 0).bfloat16()).float().square().mean().backward()
        for a, b in zip(net.parameters(), low.parameters(), strict=True):
            a.grad = b.grad.float()
        return torch.zeros(())

    net, own = Net(), []
    for rank in range(2):
        loss(net, rank)
        own.append(grads(net))
    for dtypes, found in world(2, _mixed):
        assert dtypes == ["torch.bfloat16", "torch.float32"]
        assert_same(found, [(a + b) / 2 for a, b in zip(*own, strict=True)])


def _passes(group: Group) -> tuple[float, list[str], str, int]:
    wrapped = DistributedDataParallel(Net(), process_group=group)
    loss_of(wrapped(batch(0, 0))).backward()
    missing = said_by(lambda: wrapped.nothing, AttributeError)
    logged = wrapped._get_ddp_logging_data()
    return (
        wrapped.scale,
        list(wrapped.state_dict())[:1],
        missing,
        logged["iteration"],
    )


def test_attributes_of_the_module_are_those_of_the_wrapper(world):
    ((scale, names, missing, iteration),) = world(1, _passes)
    assert (scale, names, iteration) == (2.0, ["module.first.weight"], 1)
    assert "'Net' object has no attribute 'nothing'" in missing


def _compiled(group: Group, outside: bool) -> Gradients:
    net = Net()
    if outside:
        call = torch.compile(DistributedDataParallel(net, process_group=group), backend="eager")
    else:
        call = DistributedDataParallel(torch.compile(net, backend="eager"), process_group=group)
    loss_of(call(batch(group.rank, 0))).backward()
    return grads(net)


@pytest.mark.parametrize("size", [1])
def test_compiled_modules_are_averaged(world, size):
    net = Net()
    accumulate(net, [lambda r=r: loss_of(net(batch(r, 0))) for r in range(size)])
    for found in world(size, _compiled, False):
        for a, b in zip(found, grads(net), strict=True):
            torch.testing.assert_close(a, b)


def _compiled_steps(group: Group) -> list[int]:
    """Number of graphs after each step."""
    from torch._dynamo.utils import counters  # takes a second

    wrapped = DistributedDataParallel(Net(), process_group=group)
    call = torch.compile(wrapped, backend="eager")
    counts = []
    for step in range(6):
        wrapped.set_loss_weight(1.0 + step)
        loss_of(call(batch(group.rank, step))).backward()
        counts.append(counters["stats"]["unique_graphs"])
    return counts


def test_a_step_of_a_compiled_module_is_compiled_once(procs):
    for first, second, *others in procs(2, _compiled_steps):
        assert first > 0
        assert set(others) == {
            second
        }  # what depends on whether a gradient is there is compiled twice


def _wrong(group: Group, options: dict[str, object]) -> str:
    return said_by(
        lambda: DistributedDataParallel(Net(), process_group=group, **options), ConfigError
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be"),
        ({"hash_every": -1}, "hash_every must be"),
        ({"nonfinite": "explode"}, "choose one of 'ignore', 'warn', 'raise', 'skip'"),
        ({"mixed_precision": 16}, "mixed_precision must be"),
        ({"mixed_precision": MixedPrecision(param_dtype=torch.int8)}, "dtypes must be floating"),
        ({"param_to_hook_all_reduce": nn.Parameter(torch.ones(1))}, "together"),
        ({"bucket_cap_mb_list": [0.0]}, "at least one byte"),
    ],
)
def test_options_that_make_no_sense_are_refused(world, options, words):
    assert words in world(1, _wrong, options)[0]


def _dropped(group: Group) -> list[int]:
    net = Net()
    wrapped = DistributedDataParallel(net, process_group=group)
    loss_of(wrapped(batch(group.rank, 0))).backward()
    before = sum(len(p._post_accumulate_grad_hooks) for p in net.parameters())
    del wrapped
    return [before, sum(len(p._post_accumulate_grad_hooks) for p in net.parameters())]


def test_a_dropped_wrapper_leaves_no_hooks_on_parameters(world):
    assert world(2, _dropped) == [[6, 0], [6, 0]]


def _times(
    group: Group, kind: type[nn.Module] = Net, cap_mb: float = SMALL
) -> tuple[int, list[tuple[str, ...]], bool]:
    wrapped = DistributedDataParallel(kind(), process_group=group, bucket_cap_mb_list=[cap_mb])
    before = wrapped._reducer.buckets
    loss_of(wrapped(batch(group.rank, 0))).backward()
    assert (wrapped._reducer.buckets is before) == (kind is Net)
    found = wrapped.bucket_times()
    ready = [seconds for row in found.rows for seconds in row.ready_s]
    return found.step, [row.names for row in found.rows], min(ready) > 0


def test_every_rank_hears_when_buckets_were_ready_on_all(world):
    for step, names, known in world(2, _times):
        assert (step, names[0], known) == (1, ("third.bias", "third.weight"), True)


def test_times_of_buckets_are_those_of_the_plan_that_they_were_noted_with(world):
    for step, names, known in world(2, _times, Crossed, PAIRS):
        assert (step, names[0], known) == (1, ("weights.5", "weights.4"), True)


def _several_devices(group: Group) -> Gradients:
    net = Net()
    wrapped = DistributedDataParallel(net, device_ids=["cpu", "cpu"], process_group=group)
    loss_of(wrapped(batch(group.rank, 0, 4))).backward()
    return grads(net)


def test_replicas_on_several_devices_are_reduced_here_first(world):
    net = Net()
    accumulate(net, [lambda r=r: loss_of(net(batch(r, 0, 4))) for r in range(2)])
    for found in world(2, _several_devices):
        for a, b in zip(found, grads(net), strict=True):
            torch.testing.assert_close(a, b)


def _strided(group: Group, fused: bool) -> tuple[bool, list[torch.Tensor]]:
    net = Net()
    net.second.weight = nn.Parameter(net.second.weight.detach().t())  # column by column
    wrapped = DistributedDataParallel(net, process_group=group)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=fused)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(wrapped(batch(group.rank, step))).backward()
        optimizer.step()
    same = all(p.grad.stride() == p.stride() for p in net.parameters())
    return same, [p.detach().clone() for p in net.parameters()]


def test_gradients_have_the_strides_of_their_parameters(world):
    fused, plain = world(2, _strided, True), world(2, _strided, False)
    for (same, found), (_, expected) in zip(fused, plain, strict=True):
        assert same
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


class Inside(nn.Module):
    """Shows what is inside, and the same tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.net.first(x))
        logits = self.net.third(hidden)
        return {"hidden": hidden, "logits": logits, "again": logits}


def _weighs_inside(group: Group, weight: float | None) -> tuple[Gradients, torch.Tensor]:
    net = Inside()
    wrapped = DistributedDataParallel(net, process_group=group, find_unused_parameters=True)
    wrapped.set_loss_weight(weight)
    x = batch(group.rank, 0).requires_grad_()
    found = wrapped(x)
    (by_input,) = torch.autograd.grad(found["logits"].sum(), x, retain_graph=True)
    loss_of(found["logits"]).backward()
    return grads(net), by_input


def test_weights_scale_gradients_of_parameters_and_of_nothing_else(world):
    pairs = zip(world(2, _weighs_inside, 4.0), world(2, _weighs_inside, None), strict=True)
    for (found, by_input), (expected, plain) in pairs:
        assert_same(found, expected)
        assert torch.equal(by_input, plain)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, _grad):
        raise ArithmeticError


def _zeroes_after_a_break(group: Group, leaves: bool) -> list[Gradients]:
    net = Net()
    wrapped = DistributedDataParallel(net, process_group=group, bucket_cap_mb=SMALL)
    found = []
    for step in range(3):
        net.zero_grad(set_to_none=False)
        x = batch(group.rank, step)
        if leaves and group.rank == 1 and step == 1:
            x = Breaks.apply(x.requires_grad_())
        with contextlib.suppress(ArithmeticError, CommError):
            loss_of(wrapped(x)).backward()
        found.append(grads(net))
    return [found[0], found[2]]


def test_gradients_that_are_zeroed_in_place_are_zeros_after_a_backward_that_broke(world):
    for found, expected in zip(
        world(2, _zeroes_after_a_break, True), world(2, _zeroes_after_a_break, False), strict=True
    ):
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)


def _breaks_while_accumulating(group: Group) -> list[str]:
    net = Net()
    wrapped = DistributedDataParallel(net, process_group=group, gradient_accumulation_steps=2)
    said = []
    for step in range(4):
        hidden = wrapped(batch(group.rank, step))
        if group.rank == 1 and step == 0:
            hidden = wrapped(Breaks.apply(batch(1, step).requires_grad_()))
        said.append(said_by(lambda h=hidden: loss_of(h).backward(), (CommError, ArithmeticError)))
    return said


def test_a_local_backward_that_breaks_is_told_at_the_next_averaging(world):
    first, second = world(2, _breaks_while_accumulating)
    assert "an exception ended the backward of rank 1" in first[1]
    assert first[0] == first[2] == first[3] == "nothing happened"
    assert second[0] == ""
    assert "an exception ended the backward of rank 1" in second[1]
    assert second[2:] == ["nothing happened"] * 2


def _replaces(group: Group) -> str:
    net = Net()
    wrapped = DistributedDataParallel(net, process_group=group)
    net.second.weight = nn.Parameter(net.second.weight.detach().clone())
    return said_by(lambda: wrapped(batch(0, 0)), ConfigError)


def test_parameters_that_are_replaced_after_wrapping_are_named(world):
    assert (
        "replaced or added since the module was wrapped: 'second.weight'" in world(1, _replaces)[0]
    )


def _graph_of_gradients(group: Group) -> str:
    wrapped = DistributedDataParallel(Net(), process_group=group)
    loss = loss_of(wrapped(batch(0, 0)))
    return said_by(lambda: loss.backward(create_graph=True), ConfigError)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_with_a_graph_of_their_own_are_refused(world):
    assert "create_graph=True" in world(1, _graph_of_gradients)[0]
