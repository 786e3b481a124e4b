"""Recomputation: the same gradients, the memory and the calls that the formulas say, and what it refuses."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from braid.comm.autograd import (
    LayerCost,
    LiveTensors,
    RecomputeError,
    RecomputePlan,
    Segment,
    checkpoint,
    checkpoint_sequential,
    equal_segments,
    measure,
    sqrt_segments,
)
from braid.errors import ConfigError
from braid.runtime.clock import VirtualClock


class Pair(NamedTuple):
    left: int
    right: torch.Tensor


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    name: str


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator(seed), dtype=torch.float64)


class Counted(nn.Module):
    """tanh(x W): saves its input and its output; counts its calls."""

    def __init__(self, width: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(_randn(width, width, seed=seed) / width**0.5)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(x @ self.weight)


def _chain(num_layers: int, width: int = 8) -> nn.Sequential:
    return nn.Sequential(*[Counted(width, seed) for seed in range(num_layers)])


def _gradients(model: nn.Module, y: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    y.square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


MIXED = RecomputePlan((Segment(0, 2, False), Segment(2, 5, True), Segment(5, 7, True)))


@pytest.mark.parametrize("plan", [1, 2, 3, 7, sqrt_segments(7), MIXED], ids=str)
def test_a_chain_has_the_same_bits_whatever_is_recomputed(plan):
    model, x = _chain(7), _randn(4, 8)
    expected = _gradients(model, model(x))
    _same(_gradients(model, checkpoint_sequential(model, plan, x)), expected)


@pytest.mark.parametrize(
    ("num_layers", "num_segments"), [(16, 4), (9, 3), (12, 1), (10, 4), (6, 6)]
)
def test_peak_and_calls_are_those_of_the_formula(num_layers, num_segments):
    live = LiveTensors()
    layers = [Counted(seed=seed) for seed in range(num_layers)]
    x = _randn(4, 8)
    plan = equal_segments(num_layers, num_segments)
    watched = [live.register_results(layer) for layer in layers]
    # a layer that is stopped does not return what could be watched
    y = checkpoint_sequential(watched, plan, x, early_stop=False)
    loss = y.sum()
    del y
    loss.backward()
    activation = x.nbytes
    costs = [LayerCost(activation, activation, 1.0)] * num_layers
    assert live.peak_bytes == plan.peak_bytes(costs)
    assert sum(layer.calls for layer in layers) == num_layers + plan.num_recomputed
    if num_segments**2 == num_layers:
        assert live.peak_bytes == (2 * num_segments - 1) * activation
    del loss
    assert live.count() == 0


def test_measured_costs_predict_the_peak_of_any_plan():
    class Wide(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up = nn.Linear(8, width, dtype=torch.float64)
            self.down = nn.Linear(width, 8, dtype=torch.float64)
            self.live: LiveTensors | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            register = self.live.register if self.live else lambda t: t
            return register(torch.tanh(self.down(register(torch.tanh(self.up(x))))))

    with torch.random.fork_rng():
        model = nn.Sequential(*[Wide(width) for width in (16, 40, 8, 24)])
    x = _randn(4, 8)
    clock = VirtualClock()
    costs = measure(model, x, clock=clock)
    assert costs == [
        LayerCost(4 * (w + 8) * 8, 4 * 8 * 8, 0.0) for w in (16, 40, 8, 24)
    ]  # the clock stood still
    for plan in (equal_segments(4, 1), equal_segments(4, 2), equal_segments(4, 4)):
        live = LiveTensors()
        for layer in model:
            layer.live = live
        checkpoint_sequential(model, plan, x, early_stop=False).sum().backward()
        assert live.peak_bytes == plan.peak_bytes(costs)


def test_nothing_inside_is_kept_until_backward():
    kept: list[weakref.ref[torch.Tensor]] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        inner = x.exp()
        storage = inner.untyped_storage()
        kept.append(weakref.ref(storage))
        return inner.sin().cos()

    live = LiveTensors()
    y = checkpoint(live.register_results(body), _randn(3).requires_grad_())
    assert live.count() == y.nbytes
    del y
    gc.collect()
    assert live.count() == 0


def test_structures_of_all_kinds_pass_through():
    a, b = _randn(3).requires_grad_(), _randn(3, seed=1).requires_grad_()
    buffer = _randn(3, seed=2)

    def body(first: Any, *, options: dict[str, Any], scale: float) -> dict[str, Any]:
        assert options["same"] is first[0]  # one tensor stays one
        assert first[1]["frozen"].name == "f"
        assert isinstance(options["pair"], Pair)
        assert isinstance(options["ordered"], OrderedDict)
        assert options["nothing"] == (1, "two", None)
        x, y = first[0], first[1]["frozen"].x
        z = (x * y).exp() * scale + options["pair"].right * options["ordered"]["b"]
        return {"z": [z, (z.sin(), "text")], "frozen": Frozen(z.cos(), "out")}

    def total() -> tuple[torch.Tensor, ...]:
        arguments = ([a, {"frozen": Frozen(b, "f")}],)
        options = {
            "same": a,
            "pair": Pair(1, buffer),
            "ordered": OrderedDict(b=b),
            "nothing": (1, "two", None),
        }
        yield_from = call(body, *arguments, options=options, scale=2.0)
        found = yield_from["z"][0] + yield_from["z"][1][0] + yield_from["frozen"].x
        return torch.autograd.grad(found.sum(), (a, b))

    call: Any = lambda f, *args, **kwargs: f(*args, **kwargs)  # noqa: E731
    expected = total()
    call = checkpoint
    _same(list(total()), list(expected))


def test_random_numbers_are_drawn_again_and_the_generator_goes_on():
    x = torch.ones(1000, requires_grad=True)

    def body(t: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(t.exp(), 0.5).sin()

    with torch.random.fork_rng():
        torch.manual_seed(3)
        (expected,) = torch.autograd.grad(body(x).sum(), x)
        after = torch.rand(1)
        torch.manual_seed(3)
        (found,) = torch.autograd.grad(checkpoint(body, x).sum(), x)
        assert torch.equal(found, expected)
        assert torch.equal(torch.rand(1), after)
        torch.manual_seed(3)
        (other,) = torch.autograd.grad(checkpoint(body, x, preserve_rng_state=False).sum(), x)
        assert not torch.equal(other, expected)


def test_generators_of_the_user_are_drawn_from_again():
    generator = _generator(4)
    x = torch.ones(100, requires_grad=True)

    def body(t: torch.Tensor) -> torch.Tensor:
        return (t.exp() * torch.rand(100, generator=generator)).sin()

    (expected,) = torch.autograd.grad(body(x).sum(), x)
    generator.manual_seed(4)
    (found,) = torch.autograd.grad(checkpoint(body, x, preserve_rng_state=[generator]).sum(), x)
    assert torch.equal(found, expected)


def test_autocast_is_as_it_was():
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.copy_(_randn(4, 4))
        layer.bias.zero_()
    dtypes: list[torch.dtype] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        y = layer(x).relu()
        dtypes.append(y.dtype)
        return y * y

    x = torch.ones(2, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (expected,) = torch.autograd.grad(body(x).sum(), x)
        y = checkpoint(body, x).sum()
    (found,) = torch.autograd.grad(y, x)
    assert torch.equal(found, expected)
    assert dtypes == [torch.bfloat16] * 3


def test_nested_checkpoints_keep_only_the_outer_arguments():
    live = LiveTensors()
    layers = [Counted(seed=seed) for seed in range(8)]
    watched = [live.register_results(layer) for layer in layers]
    x = _randn(4, 8)

    def half(start: int, t: torch.Tensor) -> torch.Tensor:
        for index in (start, start + 2):
            t = checkpoint(lambda u, index=index: watched[index + 1](watched[index](u)), t)
        return t

    plain = nn.Sequential(*layers)
    expected = _gradients(plain, plain(x))
    for layer in layers:
        layer.calls = 0
    y = x
    for start in (0, 4):
        y = checkpoint(half, start, y)
    assert live.count() == 2 * x.nbytes  # the input of the second half, and y
    _same(_gradients(plain, y), expected)
    # forward, the outer and the inner again; the outer stops where the last inner call would begin to save
    assert sum(layer.calls for layer in layers) == 8 + 2 * 2 + 8
    del y
    # both halves' inputs, the inner input and two outputs
    assert live.peak_bytes == 4 * x.nbytes
    assert live.count() == 0


def test_recomputation_stops_when_the_last_needed_tensor_is_there():
    ended: list[str] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        z = y + 1  # saves nothing
        ended.append("end")
        return z

    for early_stop, expected in ((True, 1), (False, 2)):
        ended.clear()
        x = _randn(3).requires_grad_()
        checkpoint(body, x, early_stop=early_stop).sum().backward()
        assert len(ended) == expected
        assert torch.equal(x.grad, x.detach().exp())


def test_only_what_the_graph_still_needs_is_computed_again():
    calls: list[str] = []

    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x.exp()
        calls.append("first")
        second = first.sin()
        calls.append("second")
        return first, second

    first, second = checkpoint(body, _randn(3).requires_grad_())
    del second  # and with it the slot of sin
    calls.clear()
    first.sum().backward()
    assert calls == []


def test_several_backward_passes_recompute_each_time():
    calls: list[int] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.exp().sin()

    x = _randn(3).requires_grad_()
    (expected,) = torch.autograd.grad(body(x).sum(), x)
    calls.clear()
    y = checkpoint(body, x)
    for _ in range(2):
        (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(found, expected)
    torch.autograd.grad(y.sum(), x)
    assert len(calls) == 1 + 3


def test_a_saved_tensor_may_be_read_twice():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            (again,) = ctx.saved_tensors
            return grad * (x + again)

    x = _randn(3).requires_grad_()
    y = checkpoint(lambda t: Twice.apply(t.exp()), x)
    assert torch.equal(y.grad_fn.saved_tensors[0], x.exp())  # outside of backward, too
    y.sum().backward()
    assert torch.allclose(x.grad, 2 * x.detach().exp() ** 2)


def test_two_derivatives_agree_with_finite_differences():
    weight = _randn(3, 3, seed=5).requires_grad_()

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda a, b: checkpoint(torch.tanh, a @ b).exp(), x, w)

    x = _randn(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(body, (x, weight))
    assert torch.autograd.gradgradcheck(body, (x, weight), torch.ones(2, 3, dtype=x.dtype))


def test_a_gradient_taken_inside_the_function_works():
    def penalty(x: torch.Tensor) -> torch.Tensor:
        y = x.exp().sin()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.square()

    x = _randn(3).requires_grad_()
    (expected,) = torch.autograd.grad(penalty(x).sum(), x)
    for early_stop in (True, False):
        (found,) = torch.autograd.grad(checkpoint(penalty, x, early_stop=early_stop).sum(), x)
        assert torch.equal(found, expected)


def test_without_grad_mode_it_is_an_ordinary_call():
    x = _randn(3).requires_grad_()
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            assert torch.equal(checkpoint(torch.exp, x), x.exp())
    y = checkpoint(torch.exp, x.detach())
    assert not y.requires_grad


def test_a_context_surrounds_both_runs():
    phases: list[bool] = []

    @contextlib.contextmanager
    def around(again: bool) -> Iterator[None]:
        phases.append(again)
        yield

    x = _randn(3).requires_grad_()
    y = checkpoint(torch.exp, x, around=around)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    y.sum().backward()
    assert phases == [False, True, True]


def test_functions_that_save_something_else_are_named():
    state = {"again": False}

    def other_shape(x: torch.Tensor) -> torch.Tensor:
        return (x[:2] if state["again"] else x).exp().sum()

    def fewer(x: torch.Tensor) -> torch.Tensor:
        return x.exp() if state["again"] else x.exp().sin()

    def more(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sin() if state["again"] else x.exp()

    def other_dtype(x: torch.Tensor) -> torch.Tensor:
        return (x.float() if state["again"] else x).exp().sum().double()

    for body, early_stop, words in (
        (other_shape, True, ["saved tensor 0 of 1", "float64[3]", "float64[2]", "other_shape"]),
        (other_dtype, True, ["float64[3]", "float32[3]", "test_autograd_recompute.py"]),
        (fewer, True, ["saved 1 tensors", "but 2 in forward", "in fewer"]),
        (more, False, ["saved 2 tensors", "but 1 in forward"]),
    ):
        state["again"] = False
        y = checkpoint(body, _randn(3).requires_grad_(), early_stop=early_stop)
        state["again"] = True
        with pytest.raises(RecomputeError) as error:
            y.sum().backward()
        assert [word for word in words if word not in str(error.value)] == []


def test_what_was_changed_in_place_is_refused():
    layer = Counted()
    known = checkpoint(layer, _randn(2, 8))  # saves the input and the output only
    seen = checkpoint(lambda t: layer(t), _randn(2, 8).requires_grad_())  # noqa: PLW0108 - no module
    with torch.no_grad():
        layer.weight.add_(1)
    for y, words in ((known, "parameter weight of Counted"), (seen, "saved tensor 0 of 3")):
        with pytest.raises(RecomputeError, match=words) as error:
            y.sum().backward()
        assert "changed in place since forward (version 0, now 1)" in str(error.value)
    x = _randn(3).requires_grad_()
    argument = x * 1
    y = checkpoint(torch.exp, argument)
    with torch.no_grad():
        argument.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_error_in_the_second_run_is_the_users():
    calls: list[int] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            msg = "no"
            raise KeyError(msg)
        return x.exp()

    x = _randn(3).requires_grad_()
    y = checkpoint(body, x)
    with pytest.raises(KeyError, match="no"):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, x.detach().exp())


def test_a_plan_for_other_layers_is_refused():
    with pytest.raises(ConfigError, match="0 to 3"):
        checkpoint_sequential(_chain(3), equal_segments(4, 2), _randn(1, 8))
