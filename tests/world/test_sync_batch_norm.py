"""SyncBatchNorm equals torch's BatchNorm on the whole batch, whatever the ranks' shares."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from training import said_by

from braid.comm import Group
from braid.comm.autograd import checkpoint
from braid.errors import ConfigError
from braid.parallel.data_parallel import DistributedDataParallel
from braid.parallel.data_parallel.sync_batch_norm import SyncBatchNorm, _combined

C = 3
STEPS = 2
SHAPES = {"vectors": (), "sequences": (4,), "images": (3, 2), "volumes": (2, 2, 2)}
ROWS = ([5], [4, 4], [3, 6], [2, 0], [1, 2, 4], [0, 1, 1])


def _inputs(step: int, num_rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(num_rows, C, *shape, generator=generator, dtype=torch.float64)
    return (3 * x + torch.arange(C).view(1, C, *(1,) * len(shape))).to(dtype)


def _affine(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        if norm.weight is not None:
            norm.weight.copy_(torch.tensor([0.5, -2.0, 3.0]))
        if norm.bias is not None:
            norm.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
    return norm


def _whole(shape: tuple[int, ...], dtype: torch.dtype, options: dict) -> nn.Module:
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[len(shape)]
    norm = kind(C, dtype=dtype, **{k: v for k, v in options.items() if k != "bias"})
    if not options.get("bias", True):
        norm.register_parameter("bias", None)  # not every torch has the argument
    return _affine(norm)


def _run(norm: nn.Module, shares: list[list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    """`shares[step]` are inputs; returns outputs and gradients of each, and what is left at the end."""
    found: dict[str, list[torch.Tensor]] = {"y": [], "dx": []}
    for step in shares:
        for share in step:
            x = share.clone().requires_grad_()
            y = norm(x)
            (y**3).sum().backward()
            found["y"].append(y.detach())
            found["dx"].append(x.grad)
    found["parameters"] = [p.grad for p in norm.parameters()]
    found["buffers"] = [b.clone() for b in norm.buffers()]
    return found


def _rank(group: Group, rows: list[int], shape, dtype, options) -> dict[str, list[torch.Tensor]]:
    norm = _affine(SyncBatchNorm(C, process_group=group, dtype=dtype, **options))
    batches = [_inputs(step, sum(rows), shape, dtype) for step in range(STEPS)]
    return _run(norm, [[x.split(rows)[group.rank]] for x in batches])


def _expect_whole(answers, rows, shape, dtype, options, **tolerance) -> None:
    norm = _whole(shape, dtype, options)
    whole = _run(norm, [[_inputs(step, sum(rows), shape, dtype)] for step in range(STEPS)])
    for name in ("y", "dx"):
        ours = [torch.cat([a[name][step] for a in answers]) for step in range(STEPS)]
        torch.testing.assert_close(ours, whole[name], **tolerance)
    summed = [sum(parts) for parts in zip(*(a["parameters"] for a in answers), strict=True)]
    torch.testing.assert_close(summed, whole["parameters"], **tolerance)
    for answer in answers:
        torch.testing.assert_close(answer["buffers"], whole["buffers"], **tolerance)
        assert all(
            torch.equal(a, b) for a, b in zip(answer["buffers"], answers[0]["buffers"], strict=True)
        )


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_outputs_gradients_and_running_statistics_are_those_of_the_whole_batch(world, rows, shape):
    answers = world(len(rows), _rank, rows, shape, torch.float64, {})
    _expect_whole(answers, rows, shape, torch.float64, {})


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 0.7, "eps": 0.1},
        {"affine": False},
        {"bias": False},
        {"track_running_stats": False},
    ],
    ids=str,
)
def test_options_mean_what_they_mean_in_torch(world, options):
    answers = world(2, _rank, [2, 3], (2, 2), torch.float64, options)
    _expect_whole(answers, [2, 3], (2, 2), torch.float64, options)


def _sixteen_bits(group: Group, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    norm = SyncBatchNorm(C, process_group=group)  # parameters and statistics in float32
    x = _inputs(0, 8, (3, 2), dtype).split([3, 5])[group.rank].clone().requires_grad_()
    y = norm(x)
    y.float().pow(3).sum().backward()
    return y.detach(), x.grad, norm.running_mean, norm.running_var


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_of_16_bit_inputs_are_of_32_bits(world, dtype):
    answers = world(2, _sixteen_bits, dtype)
    x = _inputs(0, 8, (3, 2), dtype).requires_grad_()
    norm = nn.BatchNorm2d(C)
    y = norm(x)
    y.float().pow(3).sum().backward()
    assert answers[0][0].dtype == answers[0][1].dtype == dtype
    # float32 all the way: the running statistics lose nothing to the inputs' 16 bits
    torch.testing.assert_close(answers[0][2:], (norm.running_mean, norm.running_var))
    ulp = torch.finfo(dtype).eps
    for i, whole in enumerate((y.detach(), x.grad)):
        ours = torch.cat([answer[i] for answer in answers])
        torch.testing.assert_close(ours, whole, rtol=2 * ulp, atol=2 * ulp)


def _half(group: Group) -> torch.dtype:
    norm = SyncBatchNorm(C, process_group=group).bfloat16()
    x = _inputs(0, 4, (), torch.bfloat16).requires_grad_()
    norm(x).sum().backward()
    return {p.grad.dtype for p in norm.parameters()} | {norm.running_mean.dtype}


def test_a_layer_in_16_bits_keeps_its_dtype(world):
    assert world(2, _half) == [{torch.bfloat16}] * 2


def _channels_last(group: Group) -> bool:
    norm = SyncBatchNorm(C, process_group=group)
    found = []
    for layout in (torch.contiguous_format, torch.channels_last):
        x = _inputs(0, 4, (3, 2), torch.float32).contiguous(memory_format=layout).requires_grad_()
        y = norm(x)
        (y**3).sum().backward()
        assert y.is_contiguous(memory_format=layout)
        assert x.grad.is_contiguous(memory_format=layout)
        found.append((y.detach(), x.grad))
    torch.testing.assert_close(*found)
    return True


def test_the_layout_in_memory_is_kept(world):
    assert world(1, _channels_last) == [True]


def _far_from_zero(group: Group) -> torch.Tensor:
    norm = SyncBatchNorm(C, process_group=group, momentum=1.0)
    x = _inputs(0, 64, (), torch.float64) + 1e4
    norm(x.float().chunk(group.size)[group.rank])
    return norm.running_var


def test_variance_survives_a_large_mean(world):
    x = (_inputs(0, 64, (), torch.float64) + 1e4).float().double()
    # ranks' means, about 0.5 apart, are rounded to 2**-11, which is 5e-5 of the variance of 9; a difference of sums of
    # squares in float32 would be off by about 2**-24 * 1e8 = 6 of 9
    torch.testing.assert_close(world(3, _far_from_zero)[0].double(), x.var(0), rtol=1e-4, atol=0)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(sum), st.integers(0, 99))
def test_combined_moments_are_those_of_all_values(counts, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, 2, generator=generator, dtype=torch.float64) + 5 for n in counts]
    means = torch.stack([p.mean(0) if len(p) else torch.zeros(2).double() for p in parts])
    squares = torch.stack([(p - m).square().sum(0) for p, m in zip(parts, means, strict=True)])
    found = _combined(counts, means, squares)
    variance, mean = torch.var_mean(torch.cat(parts), 0, correction=0)
    assert found.num_values == sum(counts)
    torch.testing.assert_close((found.mean, found.variance), (mean, variance))


class Net(nn.Module):
    """Two layers whose statistics depend on each other."""

    def __init__(self, norm) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first, self.second = (
            nn.Parameter(torch.randn(C, C, generator=generator, dtype=torch.float64))
            for _ in range(2)
        )
        self.norms = nn.ModuleList([norm(), norm()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norms[0](x @ self.first))
        return (self.norms[1](x @ self.second) ** 3).sum(1)


class Recomputed(nn.Module):
    """Keeps nothing for backward but its input."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.net, x, preserve_rng_state=False)


def _trained(group: Group, rows: list[int], recompute: bool) -> list[torch.Tensor]:
    model = SyncBatchNorm.convert_sync_batchnorm(
        Net(lambda: nn.BatchNorm1d(C, dtype=torch.float64)), group
    )
    wrapped = DistributedDataParallel(
        Recomputed(model) if recompute else model, process_group=group
    )
    x = _inputs(0, sum(rows), (), torch.float64).split(rows)[group.rank]
    # ranks' gradients are averaged, so each weighs its sum by the number of ranks
    (wrapped(x).sum() * group.size / sum(rows)).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("rows", [[4, 4], [2, 5, 1]], ids=str)
def test_data_parallel_training_with_it_equals_one_process(world, rows, recompute):
    answers = world(len(rows), _trained, rows, recompute)
    model = Net(lambda: nn.BatchNorm1d(C, dtype=torch.float64))
    model(_inputs(0, sum(rows), (), torch.float64)).mean().backward()
    for answer in answers:
        torch.testing.assert_close(answer, [p.grad for p in model.parameters()])


def _operations(group: Group) -> list[int]:
    norm = SyncBatchNorm(C, process_group=group)
    counts = [group.statistics()["num_operations"]]

    def count(result: object) -> None:
        counts.append(group.statistics()["num_operations"])

    x = torch.ones(2, C) * torch.arange(2.0)[:, None]
    count(y := norm(x.requires_grad_()))
    count(y.sum().backward())
    count(y := norm(x.detach()))
    count(y.sum().backward())
    count(norm.eval()(x))
    return [after - before for before, after in itertools.pairwise(counts)]


def test_forward_and_backward_communicate_once_and_evaluation_never(world):
    # the second backward has no gradient of x to compute
    assert world(2, _operations) == [[1, 1, 1, 0, 0]] * 2


def _evaluated(group: Group, track: bool) -> bool:
    norm = SyncBatchNorm(C, process_group=group, track_running_stats=track).eval()
    plain = nn.BatchNorm1d(C, track_running_stats=track).eval()
    x = _inputs(group.rank, 4, (), torch.float32)
    return torch.equal(norm(x), plain(x))


@pytest.mark.parametrize("track", [True, False])
def test_evaluation_is_that_of_an_ordinary_layer(world, track):
    assert world(2, _evaluated, track) == [True, True]


def _refused(group: Group, rows: list[int]) -> tuple[str, int]:
    norm = SyncBatchNorm(C, process_group=group)
    try:
        norm(torch.ones(rows[group.rank], C))
    except ConfigError as error:
        return str(error), norm.num_batches_tracked.item()
    return "nothing happened", -1


@pytest.mark.parametrize("rows", [[1], [1, 0], [0, 0]], ids=str)
def test_a_single_value_per_channel_is_refused_on_every_rank_and_leaves_no_trace(world, rows):
    for rank, (text, tracked) in enumerate(world(len(rows), _refused, rows)):
        assert f"more than 1 value per channel when training, got {sum(rows)} on ranks" in text
        assert f"rank {rank}" in text
        assert tracked == 0


def _twice(group: Group) -> str:
    norm = SyncBatchNorm(C, process_group=group)
    x = _inputs(group.rank, 3, (), torch.float32).requires_grad_()
    (dx,) = torch.autograd.grad((norm(x) ** 3).sum(), x, create_graph=True)
    return said_by(lambda: dx.square().sum().backward(), ConfigError)


def test_a_second_derivative_is_refused(world):
    for text in world(2, _twice):
        assert "its gradient was differentiated" in text


def _wrong_inputs(group: Group) -> list[str]:
    norm = SyncBatchNorm(C, process_group=group)
    texts = []
    for x in (torch.ones(4), torch.ones(4, C + 1), torch.ones(4, C, dtype=torch.int64)):
        try:
            norm(x)
        except ConfigError as error:
            texts.append(str(error))
    return texts


def test_inputs_that_do_not_fit_are_refused_before_anything_is_sent(world):
    assert world(1, _wrong_inputs) == [
        [
            "the input has shape [4] instead of [N, 3, ...]",
            "the input has shape [4, 4] instead of [N, 3, ...]",
            "input of SyncBatchNorm must be floating-point, got torch.int64",
        ]
    ]


@pytest.mark.parametrize("make", [SyncBatchNorm, None], ids=["made", "converted"])
def test_something_else_than_a_group_is_refused(make):
    with pytest.raises(ConfigError, match=r"braid\.init"):
        SyncBatchNorm(3) if make else SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))


class Fused(nn.BatchNorm1d):
    """With an activation that a conversion would lose."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x))


def _conversions(group: Group) -> None:
    shared = nn.BatchNorm1d(C, affine=False).eval()
    model = nn.ModuleDict(
        {
            "plain": nn.Sequential(nn.Identity(), nn.BatchNorm2d(C, momentum=None)),
            "one": nn.Sequential(shared),
            "two": nn.Sequential(shared, shared),
            "instance": nn.InstanceNorm1d(C),
        }
    )
    before = model.state_dict()
    calls: list[str] = []
    weight = model["plain"][1].weight
    handle = model["plain"][1].register_forward_hook(lambda *_: calls.append("hook"))
    found = SyncBatchNorm.convert_sync_batchnorm(model, group)
    assert found is model
    assert type(model["plain"][1]) is SyncBatchNorm
    assert model["plain"][1].weight is weight
    assert model["plain"][1].momentum is None
    assert model["one"][0] is model["two"][0] is model["two"][1]
    assert type(model["one"][0]) is SyncBatchNorm
    assert not model["one"][0].training
    assert type(model["instance"]) is nn.InstanceNorm1d
    assert model.state_dict().keys() == before.keys()
    model["plain"][1](torch.ones(2, C))
    handle.remove()
    model["plain"][1](torch.ones(2, C))
    assert calls == ["hook"]
    for alone in (nn.BatchNorm1d(C), nn.SyncBatchNorm(C), SyncBatchNorm(C, process_group=group)):
        twin = SyncBatchNorm.convert_sync_batchnorm(alone, group)
        assert type(twin) is SyncBatchNorm
        assert twin.bias is alone.bias
    twin = copy.deepcopy(model["plain"][1])
    assert twin.process_group is group
    assert twin.weight is not weight
    for wrong in (Fused(C), nn.LazyBatchNorm1d()):
        with pytest.raises(ConfigError, match=f"{type(wrong).__name__} 1"):
            SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.ReLU(), wrong), group)


def test_conversion_keeps_parameters_hooks_modes_and_what_is_shared(world):
    world(1, _conversions)


def _compiled(group: Group) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
    from torch._dynamo.utils import counters  # takes a second

    x = _inputs(group.rank, 4, (), torch.float32)
    found = []
    for compiles in (False, True):
        norm = _affine(SyncBatchNorm(C, process_group=group))
        module = nn.Sequential(norm, nn.Tanh())
        call = torch.compile(module, backend="eager") if compiles else module
        for _ in range(3):
            call(x).sum().backward()
        found.append([*(p.grad for p in norm.parameters()), *norm.buffers()])
    return counters["stats"]["unique_graphs"], *found


def test_messages_are_no_part_of_a_compiled_graph(procs):
    for num_graphs, plain, compiled in procs(2, _compiled):
        assert num_graphs <= 2  # what comes before, and what comes behind
        assert all(map(torch.equal, plain, compiled))
