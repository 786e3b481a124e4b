"""Averages in every k-th backward, weights, and options that differ: what is meant is done, what cannot be meant is said."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import batch, linear, said_by, values

from braid.comm import Group
from braid.errors import BraidError, CommError, CommTimeout, ConfigError, MismatchError
from braid.parallel.data_parallel import (
    AveragingOptimizer,
    DistributedDataParallel,
    SyncBatchNorm,
    bf16_hook,
)
from braid.parallel.gradients import Bucket, CheckedNumbers, grad_bucket

LR = 0.1


def net() -> nn.Sequential:
    return nn.Sequential(linear(4, 6), nn.Tanh(), linear(6, 2))


def loss_of(module: nn.Module, rank: int, number: int) -> torch.Tensor:
    return module(batch(rank, number)).square().mean()


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=LR)


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, found, expected))


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def in_one_process(size: int, steps: list[list[int]]) -> list[torch.Tensor]:
    """Steps of SGD on mean gradients of the ranks' batches of these numbers."""
    module = net()
    optimizer = sgd(module)
    for numbers in steps:
        optimizer.zero_grad()
        for number in numbers:
            for rank in range(size):
                (loss_of(module, rank, number) / size).backward()
        optimizer.step()
    return values(module)


# Accumulation that ends early.


def in_every_second(
    group: Group, wrap: Callable[..., object]
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """A module, what to call, and its optimizer, which average in every second backward."""
    module = net()
    if wrap is DistributedDataParallel:
        return (
            module,
            DistributedDataParallel(module, process_group=group, gradient_accumulation_steps=2),
            sgd(module),
        )
    optimizer = AveragingOptimizer(sgd(module), process_group=group, gradient_accumulation_steps=2)
    return module, module, optimizer


def _epochs_of_three(group: Group, wrap: Callable[..., object]) -> list[torch.Tensor]:
    module, wrapped, optimizer = in_every_second(group, wrap)
    for epoch in range(2):
        for number in range(3):
            if number == 2 and isinstance(wrapped, DistributedDataParallel):
                wrapped.average_next()
            loss_of(wrapped, group.rank, 3 * epoch + number).backward()
            if number:
                optimizer.step()
                optimizer.zero_grad()
    return values(module)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("wrap", [DistributedDataParallel, AveragingOptimizer])
def test_the_last_batch_of_an_epoch_is_averaged_alone(world, size, wrap):
    first, *others = world(size, _epochs_of_three, wrap)
    for other in others:
        assert_equal(other, first)
    assert_close(first, in_one_process(size, [[0, 1], [2], [3, 4], [5]]))


def _warned(group: Group, train: Callable[..., object], *arguments: object) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(group, *arguments)
    return [
        str(one.message) for one in caught if "gradients of this rank alone" in str(one.message)
    ]


def _steps_too_early(group: Group, kind: str) -> None:
    module = net()
    wrapped = DistributedDataParallel(module, process_group=group, gradient_accumulation_steps=2)
    optimizer = sgd(module)
    for number in range(6):
        loss_of(wrapped, group.rank, number).backward()
        last = number % 3 == 2  # an epoch of three batches
        if kind == "each" or last or (kind == "odd" and number % 3):
            optimizer.step()
        if kind != "keeps":
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["each", "odd", "keeps"])
def test_a_step_on_gradients_of_one_rank_alone_is_told_once(procs, kind):
    for said in procs(2, _warned, _steps_too_early, kind):
        assert len(said) == 1
        assert "'2.bias' changed after backward 1 of gradient_accumulation_steps=2" in said[0]
        assert "average_next()" in said[0]


def _changes(group: Group, kind: str) -> None:
    module = net()
    wrapped = DistributedDataParallel(module, process_group=group, gradient_accumulation_steps=3)
    optimizer = sgd(module)
    own = values(module)
    if kind == "no_sync":
        with wrapped.no_sync():
            loss_of(wrapped, group.rank, 0).backward()
        optimizer.step()
    else:  # others come, and go again, as averaged weights do
        loss_of(wrapped, group.rank, 0).backward()
        with torch.no_grad():
            for numbers in ([torch.zeros_like(one) for one in own], own):
                for param, one in zip(module.parameters(), numbers, strict=True):
                    param.copy_(one)
    wrapped(batch(group.rank, 1))


@pytest.mark.parametrize("kind", ["no_sync", "exchanged"])
def test_changes_that_are_meant_are_not_spoken_of(procs, kind):
    assert procs(2, _warned, _changes, kind) == [[], []]


def _breaks(group: Group) -> list[str]:
    module = net()
    optimizer = AveragingOptimizer(sgd(module), process_group=group, gradient_accumulation_steps=2)
    said = []

    def backward(number: int) -> None:
        hidden = module[0](batch(group.rank, number))
        if group.rank == 0 and number == 0:
            hidden.register_hook(fail)  # after the gradients of the last layer
        module[1:](hidden).square().mean().backward()

    def fail(_grad: torch.Tensor) -> None:
        raise ArithmeticError

    for number in range(6):
        said.append(said_by(lambda n=number: backward(n), (ArithmeticError, BraidError)))
        if said[-1] != "nothing happened":
            optimizer.zero_grad()
    return [one.partition(":")[0] for one in said]


def test_ranks_stay_in_step_when_one_drops_gradients_after_an_exception(world):
    fine = "nothing happened"
    broken, other = world(2, _breaks)
    assert broken == ["ArithmeticError", "CommError", *[fine] * 4]
    assert other == [fine, "CommError", *[fine] * 4]


def _drops(group: Group, wrap: Callable[..., object]) -> list[torch.Tensor]:
    module, wrapped, optimizer = in_every_second(group, wrap)
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.set_loss_weight(3.0)
    loss_of(wrapped, group.rank, 0).backward()
    optimizer.zero_grad()
    for number in (1, 2):
        loss_of(wrapped, group.rank, number).backward()
    optimizer.step()
    return values(module)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, AveragingOptimizer])
def test_gradients_that_are_dropped_restart_the_count(world, wrap):
    first, other = world(2, _drops, wrap)
    assert_equal(first, other)
    module = net()
    optimizer = sgd(module)
    for number in (1, 2):  # with weights the mean over all samples, without the sum over backwards
        share = 4 if wrap is DistributedDataParallel else 2
        for rank in range(2):
            (loss_of(module, rank, number) / share).backward()
    optimizer.step()
    assert_close(first, values(module))


# Optimizers that are known to others already.


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.body, x.requires_grad_(), use_reentrant=True)
        return found


def _scheduler_made_before(group: Group) -> list[torch.Tensor]:
    module = _Checkpointed()
    plain = sgd(module)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 100)
    optimizer = AveragingOptimizer(plain, module.named_parameters(), process_group=group)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(module, group.rank, number).backward()
        optimizer.step()
        scheduler.step()
    return values(module)


def _closure(group: Group, kind: Callable[[], nn.Module]) -> list[torch.Tensor]:
    module = kind()
    optimizer = AveragingOptimizer(sgd(module), process_group=group)
    for number in range(3):

        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(module, group.rank, number)
            loss.backward()
            return loss

        optimizer.step(closure=closure) if number else optimizer.step(closure)
    return values(module)


def test_gradients_of_a_closure_are_averaged(world):
    for found in world(2, _closure, net):
        assert_close(found, in_one_process(2, [[0], [1], [2]]))


def _in_checkpoints(group: Group, by_closure: bool) -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gradients were averaged in step")
        return _closure(group, _Checkpointed) if by_closure else _scheduler_made_before(group)


@pytest.mark.parametrize("by_closure", [True, False])
def test_neither_a_closure_nor_a_scheduler_goes_round_the_average_of_checkpoints(procs, by_closure):
    for found in procs(2, _in_checkpoints, by_closure):
        assert_close(found, in_one_process(2, [[0], [1], [2]]))


def _twice(group: Group) -> list[str]:
    optimizer = AveragingOptimizer(sgd(net()), process_group=group)
    return [
        said_by(lambda: AveragingOptimizer(optimizer, process_group=group), ConfigError),
        said_by(lambda: copy.deepcopy(optimizer), ConfigError),
    ]


def test_an_optimizer_that_averages_is_neither_made_to_do_so_again_nor_copied(world):
    again, copied = world(1, _twice)[0]
    assert "SGD already averages gradients: wrap it only once" in again
    assert "use state_dict()" in copied


# Weights.


class _Hidden(nn.Module):
    """Returns something whose tensors nobody finds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.scale = nn.Parameter(torch.ones(2))  # used by the loss alone

    def forward(self, x: torch.Tensor) -> object:
        return torch.distributions.Normal(self.body(x), 1.0, validate_args=False)


def _hidden_loss(module: _Hidden, wrapped: Callable[..., object], x: torch.Tensor) -> torch.Tensor:
    return (wrapped(x).mean * module.scale).square().mean() + module.scale.square().mean()


def _weighs(group: Group) -> list[torch.Tensor]:
    module = _Hidden()
    wrapped = DistributedDataParallel(module, process_group=group)
    rows = (6, 2)[group.rank]
    wrapped.set_loss_weight(torch.tensor(float(rows)))
    _hidden_loss(module, wrapped, batch(group.rank, 0, rows)).backward()
    return [param.grad.clone() for param in module.parameters()]


def test_weights_hold_for_outputs_that_hide_their_tensors_and_for_parameters_of_the_loss(world):
    module = _Hidden()
    x = torch.cat([batch(0, 0, 6), batch(1, 0, 2)])
    _hidden_loss(module, module, x).backward()
    for found in world(2, _weighs):
        assert_close(found, [param.grad for param in module.parameters()])


def _of_the_module(group: Group) -> list[torch.Tensor]:
    module = net()
    wrapped = DistributedDataParallel(module, process_group=group)
    wrapped.set_loss_weight(3.0)
    weight = module[0].weight
    (penalty,) = torch.autograd.grad(weight.square().sum(), weight)
    (own,) = torch.autograd.grad(wrapped.module(batch(group.rank, 0)).square().mean(), weight)
    wrapped.set_loss_weight(5.0)
    loss_of(wrapped, group.rank, 0).backward()
    return [penalty, own, weight.grad]


def test_gradients_that_are_asked_for_without_the_wrapper_have_no_weight(world):
    module = net()
    weight = module[0].weight
    for rank, (penalty, own, mean) in enumerate(world(2, _of_the_module)):
        (expected,) = torch.autograd.grad(loss_of(module, rank, 0), weight)
        assert torch.equal(penalty, 2 * weight)
        assert torch.equal(own, expected)
        whole = (loss_of(module, 0, 0) + loss_of(module, 1, 0)) / 2
        torch.testing.assert_close(mean, torch.autograd.grad(whole, weight)[0])


class _LossParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def _loss_parameter(group: Group) -> list[torch.Tensor]:
    module = _LossParameter()
    wrapped = DistributedDataParallel(module, process_group=group)
    rows = (6, 2)[group.rank]
    wrapped.set_loss_weight(rows)
    output = wrapped(batch(group.rank, 0, rows))
    # the last parameter has its gradient before backward comes to an output
    (output.square().mean() + module.scale.square().sum()).backward()
    return [param.grad.clone() for param in module.parameters()]


def test_a_parameter_that_the_loss_alone_uses_counts_what_the_forward_does(world):
    module = _LossParameter()
    output = module(torch.cat([batch(0, 0, 6), batch(1, 0, 2)]))
    (output.square().mean() + module.scale.square().sum()).backward()
    for found in world(2, _loss_parameter):
        assert_close(found, [param.grad for param in module.parameters()])


def _weighs_alone(group: Group) -> list[str]:
    module = net()
    wrapped = DistributedDataParallel(module, process_group=group)
    if group.rank:
        wrapped.set_loss_weight(100)
    said = [said_by(lambda: loss_of(wrapped, group.rank, 0).backward(), MismatchError)]
    wrapped.set_loss_weight(2)
    said.append(said_by(lambda: loss_of(wrapped, group.rank, 1).backward()))
    return [
        *said,
        *(said_by(lambda w=w: wrapped.set_loss_weight(w)) for w in ("3", -1, torch.ones(2))),
    ]


def test_weights_on_some_ranks_only_are_told_on_all(world):
    for alone, together, *wrong in world(3, _weighs_alone):
        assert "set_loss_weight() was called on 2 of 3 ranks" in alone
        assert together == "nothing happened"
        assert all("finite and not negative" in said for said in wrong)


# A step inside of backward.


def _steps_inside(group: Group, nonfinite: str) -> tuple[list[bool], list[torch.Tensor]]:
    module = net()
    wrapped = DistributedDataParallel(
        module, process_group=group, bucket_cap_mb=1e-5, nonfinite=nonfinite
    )
    wrapped.step_in_backward(lambda params: torch.optim.SGD(params, lr=LR))
    moved = []
    for number in range(4):
        before = values(module)
        loss = loss_of(wrapped, group.rank, number)
        if group.rank == 1 and number == 1:
            loss = loss * float("nan")
        said_by(loss.backward)
        moved.append(not all(map(torch.equal, before, values(module))))
    return moved, values(module)


@pytest.mark.filterwarnings("ignore:gradients of:RuntimeWarning")
@pytest.mark.parametrize("nonfinite", ["ignore", "raise", "skip"])
def test_training_goes_on_after_gradients_that_were_not_finite(world, nonfinite):
    for moved, found in world(2, _steps_inside, nonfinite):
        assert moved == [True, False, True, True]
        assert_close(found, in_one_process(2, [[0], [2], [3]]))


@pytest.mark.parametrize("nonfinite", ["ignore", "warn"])
@pytest.mark.filterwarnings("ignore:gradients of:RuntimeWarning")
def test_a_step_inside_backward_does_not_rely_on_late_checks(world, monkeypatch, nonfinite):
    find, found = Bucket.find_nonfinite, {}

    def find_late(bucket: Bucket, check: CheckedNumbers) -> list[int]:
        """Imitate a bucket on a GPU."""
        now = find(bucket, check)
        if check != "late":
            return now
        found[id(bucket)], before = now, found.get(id(bucket), [])
        return before

    monkeypatch.setattr(Bucket, "find_nonfinite", find_late)
    for moved, _ in world(2, _steps_inside, nonfinite):
        assert moved == [True, False, True, True]


def _thaws(group: Group) -> list[torch.Tensor]:
    module = net()
    module[0].weight.requires_grad_(False)
    wrapped = DistributedDataParallel(module, process_group=group)
    made = []

    def optimizer(params: list[nn.Parameter]) -> torch.optim.SGD:
        assert all(param.requires_grad for param in params)
        made.extend(params)
        return torch.optim.SGD(params, lr=LR)

    steps = wrapped.step_in_backward(optimizer)
    loss_of(wrapped, group.rank, 0).backward()
    assert "0.weight" not in steps
    module[0].weight.requires_grad_(True)
    for number in (1, 2):
        loss_of(wrapped, group.rank, number).backward()
    assert len(made) == len(steps) == 4
    return values(module)


def test_a_parameter_that_is_unfrozen_later_takes_its_steps_inside_backward(world):
    first, other = world(2, _thaws)
    assert_equal(first, other)
    assert not torch.equal(first[0], values(net())[0])


# Ranks that have no more input.


class _Synced(nn.Module):
    def __init__(self, group: Group) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(4, 6), SyncBatchNorm(6, process_group=group))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def _joins(group: Group, synced: bool) -> tuple[str, str]:
    module = _Synced(group) if synced else net()
    wrapped = DistributedDataParallel(module, process_group=group)
    refused = said_by(wrapped.join, ConfigError)

    def train() -> None:
        with wrapped.join(throw_on_early_termination=True):
            for number in range((4, 2)[group.rank]):
                loss_of(wrapped, group.rank, number).backward()

    return refused, said_by(train, CommError)


@pytest.mark.parametrize("synced", [True, False])
def test_an_early_end_is_thrown_before_a_forward_that_waits_for_others(world, synced):
    for refused, thrown in world(2, _joins, synced):
        assert ("SyncBatchNorm 'layers.1' waits" in refused) == synced
        assert "a rank has no more input" in thrown


def _frozen_statistics(group: Group) -> str:
    module = _Synced(group)
    module.layers[1].eval()
    wrapped = DistributedDataParallel(module, process_group=group)

    def train() -> None:
        with wrapped.join():
            for number in range((3, 2)[group.rank]):
                loss_of(wrapped, group.rank, number).backward()

    return said_by(train)


def test_statistics_that_are_frozen_wait_for_nobody(world):
    assert world(2, _frozen_statistics) == ["nothing happened"] * 2


# Ranks that differ, and what cannot be.


def _differs(group: Group, arguments: dict[str, object]) -> str:
    own = arguments if group.rank == 0 else {}
    return said_by(lambda: DistributedDataParallel(net(), process_group=group, **own))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"hook": "powersgd:rank=1"}, "hook='powersgd:rank=1'"),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps=3"),
        ({"static_graph": True}, "static_graph=True"),
        ({"hash_every": 5}, "hash_every=5"),
        ({"nonfinite": "skip"}, "nonfinite='skip'"),
        ({"broadcast_buffers": False}, "buffers=False"),
    ],
)
def test_arguments_that_differ_between_ranks_are_shown(world, arguments, shown):
    for said in world(3, _differs, arguments):
        assert said.startswith("MismatchError: arguments differ between ranks")
        assert f"rank 0  {shown}" in said
        assert "rank 2  " in said
        assert "parameters or their order differ" not in said


def _reacts(group: Group, kinds: tuple[str, str]) -> str:
    module = net()
    kind = kinds[min(group.rank, 1)]
    reaction = print if kind == "function" else kind
    return said_by(
        lambda: DistributedDataParallel(
            module, process_group=group, nonfinite=reaction, check_all=group.rank == 0
        )
    )


@pytest.mark.parametrize("kinds", [("warn", "ignore"), ("function", "ignore"), ("skip", "skip")])  # fmt: skip
def test_what_each_rank_tells_and_looks_at_is_its_own(world, kinds):
    assert world(2, _reacts, kinds) == ["nothing happened"] * 2


@pytest.mark.parametrize("kinds", [("ignore", "skip"), ("raise", "function")])
def test_reactions_that_would_part_the_ranks_are_shown(world, kinds):
    for said in world(2, _reacts, kinds):
        assert said.startswith("MismatchError: arguments differ between ranks")
        assert "nonfinite=" in said


def _no_value(group: Group) -> str:
    wrapped = DistributedDataParallel(net(), process_group=group)
    wrapped.register_comm_hook(None, lambda _state, _bucket: torch.futures.Future())
    return said_by(lambda: loss_of(wrapped, group.rank, 0).backward(), CommTimeout)


def test_a_future_that_never_has_a_value_is_named(world, monkeypatch):
    monkeypatch.setattr(grad_bucket, "FUTURE_S", 0.01)
    assert "the future of the communication hook for GradBucket(0: " in world(1, _no_value)[0]


def _saves(group: Group) -> tuple[int, bool]:
    module = nn.Sequential(linear(500, 400), linear(400, 4))
    wrapped = DistributedDataParallel(module, process_group=group)
    wrapped(torch.ones(2, 500)).sum().backward()
    saved = io.BytesIO()
    torch.save(module[1].bias.grad, saved)
    size = saved.tell()
    saved.seek(0)
    return size, torch.equal(torch.load(saved), torch.full((4,), 2.0))


def test_a_gradient_that_is_saved_leaves_its_bucket_behind(world):
    for nbytes, right in world(2, _saves):
        assert nbytes < 5000 < 400 * 500 * 4
        assert right


def _outlives(group: Group) -> bool:
    module = linear(300, 300)
    wrapped = DistributedDataParallel(module, process_group=group)
    wrapped(torch.ones(2, 300)).sum().backward()
    grad = module.weight.grad
    before = grad.clone()
    del wrapped, module
    gc.collect()
    for _ in range(5):
        group.empty((300 * 301,), torch.float32).fill_(-7.0)  # where memory is free again
    return torch.equal(grad, before)


def test_a_gradient_that_is_kept_keeps_its_memory(procs):
    assert procs(2, _outlives) == [True, True]


class _WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x) + self.empty.sum().float()
        return found


def _empty(group: Group) -> tuple[str, list[int]]:
    module = _WithEmpty()
    wrapped = DistributedDataParallel(module, process_group=group)
    said = said_by(lambda: loss_of(wrapped, group.rank, 0).backward(), Exception)
    return said, list(module.empty.grad.shape)


def test_a_bucket_of_empty_gradients_is_averaged(world):
    assert world(2, _empty) == [("nothing happened", [0])] * 2


def _wrong(group: Group) -> list[str]:
    def wrap(module: nn.Module | None = None, **arguments: object) -> str:
        return said_by(
            lambda: DistributedDataParallel(module or net(), process_group=group, **arguments),
            ConfigError,
        )

    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    return [
        wrap(nn.Sequential(nn.LazyLinear(3))),
        wrap(hook=bf16_hook),
        wrap(bucket_cap_mb="25"),
        said_by(lambda: ignore(net(), "0.weight"), ConfigError),
    ]


def test_what_cannot_be_meant_is_refused(world):
    lazy, hook, cap, names = world(1, _wrong)[0]
    assert "parameter '0.weight' of a lazy module has no shape yet: run the module once" in lazy
    assert "register_comm_hook(state, hook)" in hook
    assert "numbers of MiB, got '25'" in cap
    assert "put it in brackets" in names
