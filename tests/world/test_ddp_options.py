"""Options of DistributedDataParallel (buckets, hooks, precision) leave what one process leaves, or say why not."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from training import (
    PAIRS,
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
from braid.errors import BraidError, CommError, ConfigError
from braid.parallel.data_parallel import DistributedDataParallel, MixedPrecision, accumulate
from braid.parallel.data_parallel.ddp.param_snapshot import ParamSnapshot

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


def _replaces_what_is_ignored(group: Group) -> tuple[bool, bool, str]:
    net = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["third.weight"])
    wrapped = DistributedDataParallel(net, process_group=group)
    net.third.weight = nn.Parameter(net.third.weight.detach() * 2)
    loss_of(wrapped(batch(group.rank, 0))).backward()
    own = Net()
    own.third.weight = nn.Parameter(own.third.weight.detach() * 2)
    loss_of(own(batch(group.rank, 0))).backward()
    averaged = group.all_reduce(own.first.weight.grad.clone(), "avg")
    net.first.weight = nn.Parameter(net.first.weight.detach().clone())
    try:
        wrapped(batch(group.rank, 0))
    except RuntimeError as exc:  # as programs written for torch catch it
        text = str(exc)
    return (
        torch.equal(net.third.weight.grad, own.third.weight.grad),
        torch.equal(wrapped._table.records[0].param.grad, averaged),
        text,
    )


def test_ignored_parameters_may_be_replaced_and_no_others(world):
    for own, averaged, text in world(2, _replaces_what_is_ignored):
        assert (own, averaged) == (True, True)
        assert "replaced or added since the module was wrapped: 'first.weight'" in text


def test_a_replaced_parameter_is_found_though_it_has_the_id_of_a_freed_one():
    net = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2)])
    snapshot = ParamSnapshot(net.parameters(), ignored=["0"])
    net[0] = nn.Parameter(torch.ones(1))
    net[1] = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match="replaced or added since the module was wrapped: '1'"):
        snapshot.check_module(net)


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
    assert own == "OSError: no space left"
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
    assert second[0] == "ArithmeticError: "
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


def _called_with_other_tensors(group: Group) -> tuple[bool, list[Gradients]]:
    """A forward with tensors of the caller between ordinary ones; its gradients stay the caller's."""
    net = Net()
    wrapped = DistributedDataParallel(net, process_group=group)
    found = []
    given = {
        f"module.{name}": (2 * p).detach().requires_grad_() for name, p in net.named_parameters()
    }
    for step in range(2):
        wrapped.zero_grad()
        loss_of(wrapped(batch(group.rank, step))).backward()
        found.append(grads(net))
        loss_of(functional_call(wrapped, given, (batch(group.rank, step),))).backward()
        assert_same(grads(net), found[-1])
    alone = copy.deepcopy(net)
    with torch.no_grad():
        for param in alone.parameters():
            param.mul_(2)
    for step in range(2):
        loss_of(alone(batch(group.rank, step))).backward()
    same = zip(given.values(), alone.parameters(), strict=True)
    return all(torch.equal(a.grad, b.grad) for a, b in same), found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_of_tensors_that_stand_in_for_parameters_are_the_callers(world, size):
    told = world(size, _called_with_other_tensors)
    assert [own for own, _ in told] == [True] * size
    for _, found in told[1:]:
        for mine, first in zip(found, told[0][1], strict=True):
            assert_same(mine, first)
