"""Data parallel training equals the ordered loop in one process, bit by bit."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from training import said_by

from braid.comm import Group
from braid.errors import CommError, ConfigError, MismatchError
from braid.parallel.data_parallel import DistributedDataParallel, accumulate

STEPS = 4


class Branching(nn.Module):
    """Tied weights, a parameter that only some shards use, one that nobody uses, and a frozen one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator).to(dtype) * 0.3)

        self.embed = weight(11, 6)
        self.mix = weight(6, 6)
        self.rare = weight(6)
        self.never = weight(5)
        self.frozen = nn.Parameter(torch.ones(6, dtype=dtype), requires_grad=False)
        self.head = self.embed
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        hidden = torch.tanh(x @ self.head.t().t() @ self.mix) * self.frozen
        if x[0, 0] > 0:
            hidden = hidden + self.rare
        return (hidden @ self.head.t()).square().mean()


def _shard(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(5, 11, generator=generator)
    x[0, 0] = 1.0 if rank == step % 2 else -1.0
    return x.to(dtype)


def _reference(size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    model = Branching(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        shards = [_shard(rank, step, dtype) for rank in range(size)]
        accumulate(model, [lambda x=x: model(x) for x in shards])
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _train(group: Group, cap_mb: float, dtype: torch.dtype) -> list[torch.Tensor]:
    model = Branching(dtype)
    if group.rank:
        with torch.no_grad():
            model.mix.add_(1.0)  # wrapping copies rank 0's values
    wrapped = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=cap_mb, find_unused_parameters=True
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(_shard(group.rank, step, dtype)).backward()
        assert model.never.grad is None
        optimizer.step()
    assert not model.frozen.requires_grad
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("cap_mb", [25.0, 1e-5], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_equal_those_of_one_process(world, size, cap_mb, dtype):
    expected = _reference(size, dtype)
    for found in world(size, _train, cap_mb, dtype):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.procs
def test_weights_equal_those_of_one_process_on_processes(procs):
    expected = _reference(3)
    for found in procs(3, _train, 1e-5, torch.float32):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _accumulating(group: Group) -> torch.Tensor:
    model = Branching()
    wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    with wrapped.no_sync():
        wrapped(_shard(group.rank, 0)).backward()
    wrapped(_shard(group.rank, 1)).backward()
    return model.mix.grad.clone()


def test_no_sync_accumulates_locally_and_the_next_backward_averages_the_sum(world):
    def local(rank: int) -> torch.Tensor:
        model = Branching()
        model(_shard(rank, 0)).backward()
        model(_shard(rank, 1)).backward()
        return model.mix.grad

    expected = (local(0) + local(1)) / 2
    for found in world(2, _accumulating):
        assert torch.equal(found, expected)


def _other_model(group: Group) -> str:
    width = 4 if group.rank == 1 else 3
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))
    return said_by(lambda: DistributedDataParallel(model, process_group=group), MismatchError)


@pytest.mark.procs
def test_processes_with_other_parameters_see_the_lines_that_differ(procs):
    texts = procs(3, _other_model)
    assert texts == [texts[0]] * 3
    assert "rank 1  0.weight float32[4, 2]" in texts[0]
    assert "rank 2  0.weight float32[3, 2]" in texts[0]


def _frozen(group: Group) -> str:
    model = nn.Linear(2, 2, device="meta").requires_grad_(False)
    return said_by(lambda: DistributedDataParallel(model, process_group=group), ConfigError)


def test_a_model_without_trained_parameters_is_refused(world):
    assert "none of the 2 parameters of Linear requires a gradient" in world(1, _frozen)[0]


def test_something_else_than_a_group_is_refused():
    with pytest.raises(ConfigError, match=r"braid\.init"):
        DistributedDataParallel(nn.Identity(), process_group=None)


class Poison(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, _grad):
        msg = "backward went wrong"
        raise ArithmeticError(msg)


def _leaves_backward(group: Group, leaves: int | None) -> tuple[str, list[torch.Tensor | None]]:
    model = Branching()
    wrapped = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=1e-5, find_unused_parameters=True
    )
    said = ""
    try:
        loss = wrapped(_shard(group.rank, 0))
        if group.rank == leaves:
            loss = Poison.apply(model.rare).sum()
            loss = loss + model.never.exp().sum()  # differentiated before the poisoned part
        loss.backward()
    except (ArithmeticError, CommError) as error:
        said = str(error)
    wrapped.zero_grad()
    wrapped(_shard(group.rank, 1)).backward()
    return said, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_a_rank_that_leaves_backward_tells_the_others_and_all_can_go_on(world):
    told = world(3, _leaves_backward, 1)
    assert told[1][0] == "backward went wrong"
    for rank in (0, 2):
        assert "an exception ended the backward of rank 1" in told[rank][0]
    for (_, found), (_, expected) in zip(told, world(3, _leaves_backward, None), strict=True):
        for a, b in zip(found, expected, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def _times_after_a_break(group: Group) -> list[bool]:
    model = Branching()
    wrapped = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=1e-5, find_unused_parameters=True
    )
    wrapped(_shard(group.rank, 0)).backward()
    loss = wrapped(_shard(group.rank, 1))
    with contextlib.suppress(ArithmeticError, CommError):
        (
            Poison.apply(model.rare).sum() + model.never.exp().sum() if group.rank else loss
        ).backward()
    wrapped.zero_grad()
    wrapped(_shard(group.rank, 2)).backward()
    (never,) = [row for row in wrapped.bucket_times().rows if row.names == ("never",)]
    return [seconds > 0 for seconds in never.ready_s]


def test_a_step_that_broke_leaves_no_times_behind(world):
    assert world(2, _times_after_a_break) == [[False, False]] * 2


class Running(nn.Module):
    """A buffer that each rank would compute differently."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.mean.clone()
        self.mean.copy_(x.mean(0))
        self.steps += 1
        return (x * self.weight).sum() + seen.sum()


def _buffers(group: Group) -> list[float]:
    wrapped = DistributedDataParallel(Running(), process_group=group)
    x = torch.full((2, 3), float(group.rank + 1))
    found = []
    for _ in range(3):
        loss = wrapped(x)
        found.append(loss.item() - x.sum().item())
        wrapped.zero_grad()
        loss.backward()
    return found


def test_buffers_are_those_of_rank_0_after_each_averaging(world):
    assert world(2, _buffers) == [[0.0, 3.0, 3.0], [0.0, 3.0, 3.0]]


def _buffers_of_few(group: Group) -> tuple[list[float], float]:
    model, found = Running(), []
    wrapped = DistributedDataParallel(model, process_group=group)
    with wrapped.join():
        for step in range((2, 4, 3)[group.rank]):
            wrapped.zero_grad()
            wrapped(torch.full((2, 3), 10.0 * step + group.rank)).backward()
            found.append(model.mean[0].item())
    return found, model.mean[0].item()


def test_buffers_are_those_of_the_first_rank_that_still_works(world):
    means = [0.0, 10.0, 21.0, 31.0]  # of rank 0, and of rank 1 when that has no more
    assert world(3, _buffers_of_few) == [(means[:n], 31.0) for n in (2, 4, 3)]


def _buffers_and_a_break(group: Group) -> list[float]:
    model = Running()
    wrapped = DistributedDataParallel(model, process_group=group)
    for step in range(5):
        x = torch.full((2, 3), 10.0 * step + group.rank)
        breaks = group.rank == 1 and step == 2

        def leave(_grad: torch.Tensor) -> None:
            raise ArithmeticError

        handle = model.weight.register_hook(leave) if breaks else None
        wrapped.zero_grad()
        with contextlib.suppress(ArithmeticError, CommError):
            wrapped(x).backward()
        if handle is not None:
            handle.remove()
    return [*model.mean.tolist(), model.steps.item()]


def test_buffers_are_equal_again_after_a_rank_has_left_a_backward(world):
    first, second = world(2, _buffers_and_a_break)
    assert first == second
    assert first[:3] == [40.0] * 3


def _eval_in_between(group: Group) -> list[float]:
    model = Running()
    wrapped = DistributedDataParallel(model, process_group=group)
    for step, training in enumerate([True, True, False, False, True, True]):
        wrapped.train(training)
        wrapped.zero_grad()
        wrapped(torch.full((2, 3), 10.0 * step + group.rank)).backward()
    return model.mean.tolist()


def test_buffers_are_followed_through_steps_in_which_they_do_not_count(world):
    assert world(2, _eval_in_between) == [[50.0] * 3] * 2


def test_accumulate_leaves_unused_parameters_alone():
    model = Branching()
    plain = copy.deepcopy(model)
    losses = accumulate(model, [lambda: model(_shard(1, 0))])
    plain(_shard(1, 0)).backward()
    assert model.never.grad is None
    assert model.rare.grad is None
    assert torch.equal(model.embed.grad, plain.embed.grad)
    assert len(losses) == 1


class Optional(nn.Module):
    """A parameter that only some forwards use, and a buffer that each forward replaces."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.ones(2, dtype=dtype))
        self.sometimes = nn.Parameter(torch.ones(2, dtype=dtype))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: float, *, both: bool = True) -> torch.Tensor:
        self.seen = self.seen + x
        total = (self.always * x).sum() + ((self.sometimes * x).sum() if both else 0)
        return total.abs() if total.is_complex() else total


def _accumulates(group: Group, local_first: bool, used_by: tuple[int, ...]) -> float:
    model = Optional()
    wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    x = float(group.rank + 1)
    with wrapped.no_sync() if local_first else contextlib.nullcontext():
        wrapped(x).backward()
    wrapped(10 * x, both=group.rank in used_by).backward()
    return model.sometimes.grad[0].item()


@pytest.mark.parametrize(
    ("local_first", "used_by", "expected"),
    [
        (False, (), 1.5),  # (1 + 2) / 2, as it was
        (True, (), 1.5),
        (True, (0,), 6.5),  # (1 + 10 + 2) / 2
        (False, (1,), 11.5),  # (1.5 + 1.5 + 20) / 2
    ],
)
def test_an_accumulated_gradient_survives_a_backward_that_does_not_use_it(
    world, local_first, used_by, expected
):
    assert world(2, _accumulates, local_first, used_by) == [expected] * 2


def _replaced_buffers(group: Group) -> float:
    model = Optional()
    wrapped = DistributedDataParallel(model, process_group=group)
    for _ in range(3):
        wrapped(float(group.rank + 1)).backward()
    return model.seen.item()


def test_a_buffer_that_forward_replaces_is_still_that_of_rank_0(world):
    assert world(2, _replaced_buffers) == [3.0, 3.0]


class Growing(nn.Module):
    """A buffer that is longer after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: float) -> torch.Tensor:
        self.seen = torch.cat([self.seen, torch.tensor([x])])
        return (self.weight * x).sum()


def _growing_buffers(group: Group) -> tuple[list[float], int]:
    model = Growing()
    wrapped = DistributedDataParallel(model, process_group=group)
    for step in range(30):
        wrapped(float(step + 100 * group.rank)).backward()
    return model.seen.tolist(), group.persistent("all_reduce", torch.ones(1))._number


def test_buffers_of_ever_other_shapes_use_few_channels(world):
    for seen, channel in world(2, _growing_buffers):
        assert seen == [float(step) for step in range(30)]
        assert channel <= 11  # of the status, of the bucket, and those of the last shapes


def _expanded_buffer(group: Group) -> str:
    model = Running()
    model.register_buffer("mask", torch.ones(1).expand(4))
    with pytest.raises(ConfigError) as caught:
        DistributedDataParallel(model, process_group=group)
    return str(caught.value)


def test_buffers_that_cannot_be_written_to_are_refused_on_all_ranks(world):
    assert (
        world(2, _expanded_buffer)
        == [
            "elements of buffers 'mask' share memory (expand), so they cannot be written to: register the buffers with .clone()"
        ]
        * 2
    )


def _complex_gradients(group: Group) -> list[complex]:
    model = Optional(torch.complex64)
    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped(1.0, both=group.rank == 1).backward()
    return [p.grad[0].item() for p in model.parameters()]


def test_complex_parameters_may_be_unused_on_some_ranks(world):
    assert world(2, _complex_gradients) == [[1.0, 0.5]] * 2
