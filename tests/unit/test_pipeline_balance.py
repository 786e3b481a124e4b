"""Layers are measured as they train, and are afterwards as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from braid.errors import ConfigError
from braid.parallel.graph import capture
from braid.parallel.graph.segment import segments
from braid.parallel.pipeline import Balance, balance_by_size, balance_by_time
from braid.parallel.pipeline.skip import pop, skippable, stash
from braid.runtime.clock import VirtualClock
from graph_model import Model, tokens

CLOCK = VirtualClock()


@pytest.fixture(autouse=True)
def random_numbers_of_its_own():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


class Slow(torch.autograd.Function):
    """Identity that takes some virtual milliseconds, of which most are in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        CLOCK.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        CLOCK.sleep(ctx.backward_s)
        return grad, None, None


class Timed(nn.Module):
    """Takes its times in turn, the last one from then on; containers at its boundaries."""

    def __init__(self, *times: tuple[float, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.times = list(times)

    def forward(self, value: Any) -> Any:
        x = value if isinstance(value, torch.Tensor) else value["x"][0]
        times = self.times.pop(0) if len(self.times) > 1 else self.times[0]
        return {"x": (Slow.apply(x * self.weight, *times),), "text": "a", "rows": torch.arange(2)}


def test_time_is_the_median_of_forward_and_backward_without_the_first_round():
    # the second round of layer 0 is the slow one of an unlucky moment
    layers = [
        Timed((9.0, 0.0), (5.0, 0.0), (0.1, 0.2)),
        Timed((0.1, 0.5)),
        Timed((0.1, 0.1)),
    ]
    balance = balance_by_time(2, layers, torch.ones(3, 2), timeout_s=17.0, clock=CLOCK)
    assert balance.costs == pytest.approx((0.3, 0.6, 0.2))
    assert (list(balance), balance.unit) == ([1, 2], "s")
    assert balance.stage_costs == pytest.approx([0.3, 0.8])


def test_one_round_is_timed_though_the_first_has_used_up_the_time():
    layers = [Timed((1.0, 0.0)), Timed((3.0, 0.0)), Timed((1.0, 0.0))]
    balance = balance_by_time(3, layers, torch.ones(3, 2), timeout_s=0.5, clock=CLOCK)
    assert balance.costs == (1.0, 3.0, 1.0)


class Norm(nn.Module):
    """Changes buffers, also by replacing one; draws random numbers; changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.training
        self.calls = self.calls + 1
        return self.linear(self.dropout(self.norm(self.relu(x))))


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
@pytest.mark.parametrize("by", [balance_by_time, balance_by_size])
def test_layers_are_afterwards_as_they_were(by, device):
    model = nn.Sequential(Norm(), Norm(), Norm())
    model[0](torch.randn(5, 4)).sum().backward()
    model[1].eval()
    model[2].norm.eval()
    modes = [m.training for m in model.modules()]
    grads = {p: p.grad for p in model.parameters()}
    kept = {p: None if g is None else g.clone() for p, g in grads.items()}
    buffers = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    sample = torch.randn(5, 4)
    before, random = sample.clone(), torch.get_rng_state()
    options = {"timeout_s": 0.0} if by is balance_by_time else {}
    by(2, model, sample, device=device, **options)
    assert torch.equal(sample, before)
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in model.modules()] == modes
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, values[name])
    for param, grad in grads.items():
        assert param.grad is grad
        assert grad is None or torch.equal(grad, kept[param])


def test_a_layer_that_fails_is_named_and_all_are_restored():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(5, 4), nn.BatchNorm1d(4)).eval()
    with pytest.raises(ConfigError, match=r"layer 1 \(Linear\) .* RuntimeError: mat1 and mat2"):
        balance_by_time(2, model, torch.randn(6, 4))
    assert not model[0].training
    assert model[0].num_batches_tracked == 0


def test_size_is_what_a_microbatch_leaves_for_backward_and_the_parameters():
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2), nn.Identity())
    balance = balance_by_size(2, model, torch.randn(9, 4), num_microbatches=2, param_scale=3.0)
    nbytes = model[0].weight.element_size()
    # the largest micro-batch has 5 rows; Tanh keeps its output, which is the input of the next
    sizes = [5 * 16, 5 * 16, 5 * 2, 0]
    params = [4 * 16 + 16, 0, 16 * 2 + 2, 0]
    expected = tuple(nbytes * (a + 3 * p) for a, p in zip(sizes, params, strict=True))
    assert balance.costs == expected
    assert (balance.sizes, balance.unit) == ((1, 3), "bytes")


@skippable(stash=["early"])
class Enters(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        wide = torch.tanh(x @ torch.ones(4, 100))
        yield stash("early", wide)
        return x * 2


@skippable(pop=["early"])
class Leaves(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        early = yield pop("early")
        return early * x[:, :1]


def test_skip_connections_reach_their_layer_and_count_where_they_are_stashed():
    layers = [nn.Linear(4, 4), Enters(), nn.Tanh(), Leaves()]
    sizes = balance_by_size(2, layers, torch.randn(3, 4)).costs
    assert sizes[1] == 4 * (3 * 100 + 4 * 100 + 3 * 4)  # tanh, the matrix, and the output
    assert len(balance_by_time(4, layers, torch.randn(3, 4), timeout_s=0.0).costs) == 4


def test_segments_of_a_captured_model_are_layers_too():
    model = Model()
    parts = segments(capture(model, tokens(4)), 4)
    balance = balance_by_time(2, parts, tokens(4), timeout_s=0.0)
    assert len(balance.costs) == 4
    assert min(balance.costs) > 0
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize(
    ("by", "options", "words"),
    [
        (balance_by_time, {"num_parts": 3}, "2 layers cannot be divided into 3 parts"),
        (balance_by_size, {"num_microbatches": 0}, "num_microbatches must be at least 1"),
        (balance_by_size, {"param_scale": -1.0}, "param_scale not negative, got 1 and -1.0"),
        (balance_by_size, {"sample": torch.ones(0, 4)}, "0 rows"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_a_layer_runs(by, options, words):
    model = nn.Sequential(Norm(), Norm())
    given = {"num_parts": 2, "layers": model, "sample": torch.ones(2, 4), **options}
    with pytest.raises(ConfigError, match=words):
        by(**given)
    assert model[0].calls == 0


def test_the_picture_has_a_bar_for_each_stage_and_layer():
    names = ("0 Embedding", "1 Block", "2 Block", "3 Head")
    balance = Balance((3, 1), names, (0.001, 0.004, 0.004, 0.003), "s")
    assert str(balance).splitlines() == [
        "stage 0  3 layers  9 ms  ██████████████████████████████  heaviest",
        "  0 Embedding      1 ms  ███▍",
        "  1 Block          4 ms  █████████████▍",
        "  2 Block          4 ms  █████████████▍",
        "stage 1  1 layer   3 ms  ██████████",
        "  3 Head           3 ms  ██████████",
    ]
    even = Balance((1, 1), ("a", "b"), (3 * 2.0**20, 3 * 2.0**20), "bytes")
    assert "heaviest" not in str(even)
    assert "3.0 MiB" in str(even)
