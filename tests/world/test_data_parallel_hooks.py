"""Communication hooks: what they send, what they keep for later, and that all ranks agree."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch_jobs import run
from training import said_by

from braid.comm import Group
from braid.comm.formats import LowRank
from braid.errors import ConfigError
from braid.parallel.data_parallel import (
    DistributedDataParallel,
    PostLocalSGDHook,
    PowerSGDHook,
    PowerSGDOptions,
    adasum_hook,
    bf16_hook,
    fp16_hook,
)
from braid.parallel.data_parallel.ddp.mixed_precision import MixedPrecision
from braid.parallel.data_parallel.hooks.catalogue import hook_of
from braid.parallel.gradients import GradBucket, ParamTable
from braid.types import text_digest
from support.pool import ProcessPool

WIDTH = 24
MANY = 1e-5  # MiB: a bucket for each parameter


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """Without use of the default generator."""
    return nn.utils.skip_init(nn.Linear, inputs, outputs)


def _model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(_linear(12, WIDTH), nn.Tanh(), _linear(WIDTH, WIDTH), nn.Tanh())
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=generator) * 0.3
    return model


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(1000 * rank + step))


def _gradients(wrapped: DistributedDataParallel, rank: int, step: int) -> list[torch.Tensor]:
    wrapped.zero_grad()
    wrapped(_batch(rank, step)).square().sum().backward()
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for p in wrapped.module.parameters()
    ]


def _plain(group: Group, steps: int, cap_mb: float = 25.0) -> list[list[torch.Tensor]]:
    wrapped = DistributedDataParallel(_model(), process_group=group, bucket_cap_mb=cap_mb)
    return [_gradients(wrapped, group.rank, step) for step in range(steps)]


def _hooked(
    group: Group, hook: Any, steps: int, cap_mb: float = 25.0, state: Any = None
) -> list[list[torch.Tensor]]:
    wrapped = DistributedDataParallel(_model(), process_group=group, bucket_cap_mb=cap_mb)
    wrapped.register_comm_hook(state, copy.deepcopy(hook))
    return [_gradients(wrapped, group.rank, step) for step in range(steps)]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one == other


# PowerSGD.


def _factors_by_hand(size: int, steps: int, rank: int) -> list[list[torch.Tensor]]:
    """Algorithm 2 of the paper with all ranks in one process."""
    model = _model()
    named = dict(model.named_parameters())
    errors = [{n: torch.zeros_like(p) for n, p in named.items()} for _ in range(size)]
    low: dict[str, LowRank] = {}
    found = []
    for step in range(steps):
        grads = []
        for r in range(size):
            model.zero_grad()
            model(_batch(r, step)).square().sum().backward()
            grads.append({n: p.grad.clone() for n, p in named.items()})
        means = []
        for name, param in named.items():
            if param.dim() < 2:
                means.append(sum(g[name] for g in grads) / size)
                continue
            turned = param.shape[0] > param.shape[1]
            ms = [grads[r][name] + errors[r][name] for r in range(size)]
            turn = [m.T if turned else m for m in ms]
            if name not in low:
                generator = torch.Generator().manual_seed(text_digest(f"0 {name} 0"))
                low[name] = LowRank(*turn[0].shape, rank, generator=generator)
            p = sum(low[name].compress(m) for m in turn) / size
            q = sum(low[name].project(m, p) for m in turn) / size
            out = torch.empty(turn[0].shape)
            low[name].finish(p, q, out)
            mean = out.T.contiguous() if turned else out
            for r in range(size):
                errors[r][name] = ms[r] - mean
            means.append(mean)
        found.append(means)
    return found


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("cap_mb", [25.0, MANY], ids=["one bucket", "many buckets"])
def test_power_sgd_is_algorithm_2_of_the_paper_whatever_the_buckets(world, size, cap_mb):
    hook = PowerSGDHook(PowerSGDOptions(rank=2))
    told = world(size, _hooked, hook, 4, cap_mb)
    assert all(_equal(found, told[0]) for found in told)
    torch.testing.assert_close(told[0], _factors_by_hand(size, 4, 2), rtol=1e-4, atol=1e-4)


def test_power_sgd_of_full_rank_is_the_average(world):
    hook = PowerSGDHook(PowerSGDOptions(rank=WIDTH, rate=0.1))
    told, expected = world(2, _hooked, hook, 3), world(2, _plain, 3)
    torch.testing.assert_close(told, expected, rtol=1e-4, atol=1e-4)


def test_power_sgd_leaves_gradients_alone_before_its_start(world):
    hook = PowerSGDHook(PowerSGDOptions(start=2))
    told, expected = world(2, _hooked, hook, 3, MANY), world(2, _plain, 3, MANY)
    assert _equal(told[0][:2], expected[0][:2])
    assert not torch.equal(told[0][2][0], expected[0][2][0])
    assert torch.equal(told[0][2][1], expected[0][2][1])  # a vector


def _sums(group: Group) -> tuple[Any, Any]:
    """What all ranks got in some steps, plus what is still owed, and what they gave."""
    hook = PowerSGDHook()
    wrapped = DistributedDataParallel(_model(), process_group=group)
    wrapped.register_comm_hook(None, hook)
    got = [_gradients(wrapped, group.rank, step)[2] for step in range(3)]
    given = [_gradients(_Alone(), group.rank, step)[2] for step in range(3)]
    owed = hook.state_dict()["error"]["2.weight"].view(WIDTH, WIDTH)
    mine = torch.stack([sum(given), owed])
    given_all, owed_all = group.all_reduce(mine, "avg")
    return sum(got) + owed_all, given_all


class _Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = _model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_what_power_sgd_misses_is_kept_so_that_nothing_is_lost(world):
    for got, given in world(2, _sums):
        torch.testing.assert_close(got, given, rtol=1e-4, atol=1e-4)


def _resumed(group: Group, name: str, pause: int) -> list[list[torch.Tensor]]:
    found = []
    state: dict[str, Any] = {}
    for begin, end in ((0, pause), (pause, 4)):
        wrapped = DistributedDataParallel(_model(), process_group=group, hook=name)
        if state:
            wrapped.load_hook_state(copy.deepcopy(state))
            assert _equal(wrapped.hook_state(), state)
        found += [_gradients(wrapped, group.rank, step) for step in range(begin, end)]
        state = wrapped.hook_state()
    return found


def test_power_sgd_goes_on_from_its_state_as_if_nothing_had_been(world):
    name = "powersgd:rank=2,start=1"
    assert _equal(world(2, _resumed, name, 2), world(2, _resumed, name, 0))


def _lost_in_16_bits(group: Group) -> tuple[float, float]:
    weight = nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16))
    model = nn.Module()
    model.weight = weight
    x = _batch(group.rank, 0)[:8, :8].repeat(2, 2)
    model.forward = lambda scale: (weight * x * scale).sum()
    hook = PowerSGDHook(PowerSGDOptions(rank=1))
    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.register_comm_hook(None, hook)
    wrapped(1.0).backward()
    given = x.bfloat16().float()
    owed = hook.state_dict()["error"]["weight"].view(16, 16)
    both = group.all_reduce(torch.stack([given, owed]), "avg")
    return (both[0] - both[1] - weight.grad.float()).abs().max().item()


def test_gradients_of_16_bits_keep_what_they_round(world):
    assert all(lost < 1e-6 for lost in world(2, _lost_in_16_bits))


def _pauses(group: Group) -> float:
    """How much is missing of what one parameter was to get, which no rank uses in the second step."""
    model = nn.Module()
    model.always, model.at_times = (nn.Parameter(torch.zeros(8, 8)) for _ in range(2))
    generator = torch.Generator().manual_seed(group.rank)
    model.forward = lambda a, b: (
        (model.always * a).sum() + (0 if b is None else (model.at_times * b).sum())
    )
    hook = PowerSGDHook(PowerSGDOptions(rank=1))
    wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    wrapped.register_comm_hook(None, hook)
    missing = torch.zeros(8, 8)
    for step in range(3):
        wrapped.zero_grad()
        given = None if step == 1 else torch.randn(8, 8, generator=generator)
        wrapped(torch.randn(8, 8, generator=generator), given).backward()
        assert (model.at_times.grad is None) == (given is None)
        if given is not None:
            missing += group.all_reduce(given.clone(), "avg") - model.at_times.grad
    owed = hook.state_dict()["error"]["at_times"].view(8, 8)
    return (missing - group.all_reduce(owed.clone(), "avg")).abs().max().item()


def test_what_is_owed_to_a_parameter_survives_a_step_in_which_nobody_uses_it(world):
    assert all(lost < 1e-5 for lost in world(2, _pauses))


# Parameters that do not lie row by row.


def _wider(state: object, bucket: GradBucket) -> Any:
    """The average, in another buffer."""
    before = [gradient.clone() for gradient in bucket.gradients()]
    bucket.set_buffer(bucket.buffer().double())
    assert all(map(torch.equal, before, [g.float() for g in bucket.gradients()]))
    return bucket.group.all_reduce(bucket.buffer(), "avg", async_op=True)


def _strided(group: Group, hook: Any, strided: bool) -> list[torch.Tensor]:
    model = nn.Module()
    image, matrix = torch.zeros(8, 6, 3, 3), torch.zeros(10, 12)
    if strided:
        image = image.to(memory_format=torch.channels_last)
        matrix = torch.zeros(12, 10).T
    model.params = nn.ParameterList([image, matrix, torch.zeros(5, 2).T[:1]])
    generator = torch.Generator().manual_seed(group.rank)
    model.forward = lambda xs: sum((p * x).sum() for p, x in zip(model.params, xs, strict=True))
    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.register_comm_hook(None, copy.deepcopy(hook))
    found: list[torch.Tensor] = []
    for _ in range(3):
        wrapped.zero_grad()
        wrapped([torch.randn(p.shape, generator=generator) for p in model.params]).backward()
        found += [p.grad.clone() for p in model.params]
    return found


@pytest.mark.parametrize(
    "hook",
    [PowerSGDHook(), PowerSGDHook(PowerSGDOptions(error_feedback=False)), adasum_hook, _wider],
    ids=["powersgd", "powersgd that forgets", "adasum", "set_buffer"],
)
def test_hooks_do_not_mind_how_parameters_lie_in_memory(world, hook):
    told, expected = world(2, _strided, hook, True), world(2, _strided, hook, False)
    torch.testing.assert_close(told, expected, rtol=1e-4, atol=1e-4)


# Casts, torch's hooks, users' hooks.


@pytest.mark.parametrize("hook", [bf16_hook, fp16_hook], ids=str)
def test_a_cast_changes_numbers_inside_of_a_host_too(world, hook):
    told, expected = world(2, _hooked, hook, 1, MANY), world(2, _plain, 1, MANY)
    for found, exact in zip(told[0][0], expected[0][0], strict=True):
        assert torch.equal(found, found.to(hook.dtype).float())
        torch.testing.assert_close(found, exact, rtol=2e-2, atol=1e-2)
    assert _equal(told[0], told[1])


def _cast_complex(group: Group) -> complex:
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    model = nn.Module()
    model.weight = weight
    model.forward = lambda factor: (weight * factor).sum().abs()
    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.register_comm_hook(None, bf16_hook)
    wrapped(1j).backward()
    return weight.grad[0].item()


def test_complex_gradients_are_not_cast(world):
    assert world(2, _cast_complex) == [1.0 + 0.0j] * 2


def _in_half(group: Group, hook: Any) -> list[float]:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    model = nn.Module()
    model.weight = weight
    model.forward = lambda factor: (weight * factor).sum()
    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.register_comm_hook(None, hook)
    wrapped(2.0**20).backward()
    return weight.grad.tolist()


def test_gradients_of_16_bits_are_not_cast(world):
    """In the other 16 bits this would be infinite."""
    assert world(2, _in_half, fp16_hook) == [[2.0**20] * 2] * 2


def _wrong_order(group: Group) -> tuple[list[int], list[torch.Tensor]]:
    """Ranks use two branches in different orders, so buckets are full in different orders."""
    model = nn.ModuleList([_linear(4, 4) for _ in range(3)])
    for param in model.parameters():
        param.data.fill_(0.1)
    order = [0, 1, 2] if group.rank else [2, 0, 1]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for index in order:
            x = model[index](x)
        return x

    model.forward = forward
    called: list[int] = []

    def hook(state: Group, bucket: GradBucket) -> Any:
        called.append(bucket.index())
        return state.all_reduce(bucket.buffer(), "avg", async_op=True)

    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=MANY)
    wrapped.register_comm_hook(group, hook)
    wrapped(torch.full((2, 4), group.rank + 1.0)).sum().backward()
    return called, [p.grad.clone() for p in model.parameters()]


def test_hooks_are_called_in_the_same_order_on_all_ranks(world):
    (called, one), (also_called, other) = world(2, _wrong_order)
    assert called == also_called == sorted(called)
    assert len(called) == 6
    assert _equal(one, other)


def _other_buffer(group: Group) -> list[torch.Tensor]:
    def hook(_: object, bucket: GradBucket) -> Any:
        bucket.set_buffer(bucket.buffer().double())
        assert [g.dtype for g in bucket.gradients()] == [torch.float64] * 4
        return group.all_reduce(bucket.buffer(), "avg", async_op=True)

    wrapped = DistributedDataParallel(_model(), process_group=group)
    wrapped.register_comm_hook(None, hook)
    return _gradients(wrapped, group.rank, 0)


def test_a_hook_may_set_another_buffer(world):
    torch.testing.assert_close(world(2, _other_buffer), [found[0] for found in world(2, _plain, 1)])


def _turned(group: Group, kind: str) -> list[float] | str:
    weight = nn.Parameter(torch.zeros(4))
    model = nn.Module()
    model.weight = weight
    model.forward = lambda factor: (weight * factor).sum()

    def hook(_: object, bucket: GradBucket) -> Any:
        turned = bucket.buffer().view(2, 2).T
        if kind == "buffer":
            bucket.set_buffer(turned)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(turned)
        return future

    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.register_comm_hook(None, hook)
    try:
        wrapped(torch.arange(4.0)).backward()
    except ConfigError as error:
        return str(error)
    return weight.grad.tolist()


def test_a_hook_may_bring_a_tensor_of_any_strides_but_not_as_the_buffer(world):
    assert world(1, _turned, "future") == [[0.0, 2.0, 1.0, 3.0]]
    assert "pass tensor.contiguous()" in world(1, _turned, "buffer")[0]


def _torch_hooks(kind: str) -> list[list[torch.Tensor]]:
    wrapped = DistributedDataParallel(_model(), process_group=dist.group.WORLD, bucket_cap_mb=MANY)
    if kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=WIDTH,
            start_powerSGD_iter=2,
            min_compression_rate=0.1,
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hooks = {
            "all_reduce": default_hooks.allreduce_hook,
            "bf16": default_hooks.bf16_compress_hook,
            "wrapped": default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
            "ours": bf16_hook,
        }
        wrapped.register_comm_hook(dist.group.WORLD, hooks[kind])
    return [_gradients(wrapped, dist.get_rank(), step) for step in range(3)]


@pytest.mark.procs
@pytest.mark.parametrize("kind", ["all_reduce", "bf16", "wrapped", "powersgd", "ours"])
def test_hooks_of_torch_work_over_its_process_group(
    pool: ProcessPool, tmp_path: Path, kind: str
) -> None:
    told = run(pool, tmp_path, 2, _torch_hooks, kind)
    expected = pool.run(2, _plain, 3, MANY)
    coarse = kind in {"bf16", "wrapped", "ours"}
    torch.testing.assert_close(told[0], told[1], rtol=0, atol=0)
    torch.testing.assert_close(
        told[0], expected[0], rtol=3e-2 if coarse else 1e-4, atol=3e-2 if coarse else 1e-4
    )


def _learns(group: Group, hook: Any, steps: int) -> tuple[float, float]:
    """Loss over all ranks' data of a linear map that is learnt, before and after."""
    generator = torch.Generator().manual_seed(9)
    true = torch.randn(16, 16, generator=generator)
    drawn = torch.randn(16, 16, generator=torch.Generator().manual_seed(group.rank))
    x = 4 * torch.linalg.qr(drawn).Q  # as steep in all directions
    model = nn.utils.skip_init(nn.Linear, 16, 16, bias=False)
    model.weight.data.zero_()
    wrapped = DistributedDataParallel(model, process_group=group)
    if hook is not None:
        wrapped.register_comm_hook(None, copy.deepcopy(hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (wrapped(x) - x @ true.T).square().sum(1).mean()
        loss.backward()
        optimizer.step()
        losses.append(group.all_reduce(loss.detach().clone(), "avg").item())
    return losses[0], losses[-1]


@pytest.mark.parametrize(
    "hook",
    [
        None,
        bf16_hook,
        adasum_hook,
        PowerSGDHook(PowerSGDOptions(rank=2)),
        PowerSGDHook(PowerSGDOptions(rank=2, warm_start=False)),
    ],
    ids=["none", "bf16", "adasum", "powersgd", "powersgd from random"],
)
def test_training_reaches_the_loss_that_it_reaches_without_compression(world, hook):
    for first, last in world(2, _learns, hook, 150):
        assert last < 1e-3 * first


def test_power_sgd_without_error_feedback_does_not(world):
    hook = PowerSGDHook(PowerSGDOptions(rank=2, error_feedback=False))
    for first, last in world(2, _learns, hook, 150):
        assert last > 1e-2 * first


# Names.


def _refused(group: Group, name: str) -> str:
    return said_by(
        lambda: DistributedDataParallel(_model(), process_group=group, hook=name), ConfigError
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zip", "bf16, fp16, float16, int8, topk:RATIO, powersgd:OPTIONS"),
        ("bf16+int8", "hook='bf16+int8' is unknown"),
        (
            "topk:0.1+powersgd",
            "not a wire format for powersgd, choose one of bf16, fp16, float16, int8",
        ),
        ("topk:much", "is not a number"),
        ("powersgd:rnk=2", "rank=1, start=0, rate=2.0, warm_start=true, error_feedback=true"),
        ("powersgd:warm_start=perhaps", "'warm_start=perhaps' is not an option"),
        ("powersgd:rank=0", "powersgd got rank=0"),
        ("powersgd:rank=24", "the largest is 2.weight"),
    ],
)
def test_a_name_that_means_nothing_is_refused_with_those_that_do(world, name, words):
    assert words in world(1, _refused, name)[0]


def _never_factored(kind: str) -> nn.Module:
    if kind == "sparse":
        return nn.utils.skip_init(nn.Embedding, 64, 64, sparse=True)
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(64, 64, dtype=getattr(torch, kind)))
    return model


@pytest.mark.parametrize("kind", ["complex64", "float64", "sparse"])
def test_matrices_that_powersgd_never_factors_are_said_to_be_of_another_kind(kind):
    words = (
        r"among 0 parameters of float32, bfloat16, float16 with dense .*; 1 more, .* never factored"
    )
    with pytest.raises(ConfigError, match=words):
        hook_of("powersgd:rank=2,start=1", SimpleNamespace(), ParamTable.of(_never_factored(kind)))
    both = nn.ModuleList([_never_factored(kind), _linear(2, 2)])
    with pytest.raises(
        ConfigError, match=r"largest is 1\.weight float32\[2, 2\]; 1 more, .* lower"
    ):
        hook_of("powersgd:rank=2,start=1", SimpleNamespace(), ParamTable.of(both))


@pytest.mark.parametrize(
    ("name", "instead"), [("int8", "bf16_hook"), ("bf16+powersgd", "use hook='powersgd' instead")]
)
def test_a_format_is_refused_where_a_backend_of_torch_moves_numbers(name, instead):
    table = ParamTable.of(_model())
    engine = SimpleNamespace(capabilities=SimpleNamespace(wires=False))
    with pytest.raises(ConfigError, match=f"cannot run on this group, .* {instead}"):
        hook_of(name, SimpleNamespace(engine=engine), table)
    assert hook_of("powersgd", SimpleNamespace(engine=engine), table)[0] is None


def _other_state(group: Group, hook: Any) -> str:
    wrapped = DistributedDataParallel(_model(), process_group=group, hook="powersgd")
    _gradients(wrapped, group.rank, 0)
    other = DistributedDataParallel(_model(), process_group=group)
    if hook is not None:
        other.register_comm_hook(None, hook)
    return said_by(lambda: other.load_hook_state(wrapped.hook_state()), ConfigError)


@pytest.mark.parametrize(
    ("hook", "words"),
    [(None, "wrap with the same hook"), (PostLocalSGDHook(1), "got ['error', 'q', 'steps']")],
    ids=["none", "post-local"],
)
def test_state_of_another_hook_is_refused(world, hook, words):
    assert words in world(1, _other_state, hook)[0]


# Wire formats, between hosts.


def _in_16_bits(group: Group, options: dict[str, Any]) -> torch.Tensor:
    wrapped = DistributedDataParallel(_model(), process_group=group, **options)
    return _gradients(wrapped, group.rank, 0)[0]


@pytest.mark.procs
def test_gradients_reduced_in_16_bits_are_those_of_the_hook_of_that_name(hosts):
    wanted = MixedPrecision(reduce_dtype=torch.float16)
    told = hosts(3, _in_16_bits, {"mixed_precision": wanted})
    expected = hosts(3, _in_16_bits, {"hook": "fp16"})
    assert all(torch.equal(found, expected[0]) for found in [*told, *expected])


def _owed(group: Group, name: str, event: str) -> tuple[torch.Tensor, torch.Tensor]:
    wrapped = DistributedDataParallel(_model(), process_group=group, bucket_cap_mb=0.003, hook=name)
    got = []
    for step in range(3):
        got.append(_gradients(wrapped, group.rank, step)[2])
        if event == "planned anew":
            wrapped.module[0].bias.requires_grad_(step == 1)
        elif event == "frozen for a step":
            wrapped.module[2].weight.requires_grad_(step == 1)
        elif event == "loaded":
            wrapped.load_hook_state(wrapped.hook_state())
    steps = (0, 2) if event == "frozen for a step" else (0, 1, 2)
    given = [_gradients(_Alone(), group.rank, step)[2] for step in steps]
    owed = wrapped.hook_state()["residuals"].get("2.weight", torch.zeros(WIDTH, WIDTH))
    given_all, owed_all = group.all_reduce(torch.stack([sum(given), owed]), "avg")
    assert bool(owed_all.any())
    return sum(got) + owed_all, given_all


@pytest.mark.procs
@pytest.mark.parametrize("size", [3, 5], ids=["two hosts", "three hosts"])
@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("bf16", ""),
        ("int8", "planned anew"),
        ("topk:0.1", "planned anew"),
        ("topk:0.1", "frozen for a step"),
        ("topk:0.1", "loaded"),
    ],
)
def test_what_a_format_left_out_is_told_by_name_so_that_nothing_is_lost(hosts, size, name, event):
    for got, given in hosts(size, _owed, name, event):
        torch.testing.assert_close(got, given, rtol=1e-4, atol=1e-3)


def _handed_over(group: Group, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    got, given = [], []
    state: dict[str, Any] | None = None
    for step in range(3):  # wrapped anew each time, with the state of another rank
        wrapped = DistributedDataParallel(_model(), process_group=group, hook=name)
        if state is not None:
            wrapped.load_hook_state(
                group.objects.all_gather(state, allow_pickle=True)[group.rank - 1]
            )
        got.append(_gradients(wrapped, group.rank, step)[2])
        given.append(_gradients(_Alone(), group.rank, step)[2])
        state = wrapped.hook_state()
    owed = state["residuals"]["2.weight"]
    given_all, owed_all = group.all_reduce(torch.stack([sum(given), owed]), "avg")
    return sum(got) + owed_all, given_all


@pytest.mark.procs
def test_residuals_may_go_on_at_another_rank(hosts):
    for got, given in hosts(4, _handed_over, "topk:0.1"):
        torch.testing.assert_close(got, given, rtol=1e-4, atol=1e-3)


@pytest.mark.procs
def test_factors_in_16_bits_are_equal_on_all_hosts(hosts):
    def spread(found: list[Any]) -> bool:
        return all(_equal(one, found[0]) for one in found)

    assert spread(hosts(4, _resumed, "bf16+powersgd:rank=2", 0))
