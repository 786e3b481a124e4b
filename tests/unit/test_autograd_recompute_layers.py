"""Recomputed layers of models: the bits of a plain run, the memory, and the layers that run again."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from braid.comm.autograd import (
    LayerCost,
    LiveTensors,
    RecomputeError,
    checkpoint,
    equal_segments,
    recompute_layers,
    sqrt_segments,
)
from braid.errors import ConfigError
from operators import Operators

ROOT = Path(__file__).parents[2]
WIDTH = 8
ADDMM = torch.ops.aten.addmm.default


class Layer(nn.Module):
    """Two linear layers, BatchNorm and dropout; counts its calls and its live activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, mask: Any = None) -> torch.Tensor:
        self.calls += 1
        y = functional.dropout(torch.tanh(self.norm(self.up(x))) * scale, 0.3)
        y = functional.dropout(self.down(y), 0.3)
        return y if mask is None else y * mask


class Net(nn.Module):
    """A model as people write them: a list of layers, arguments, residuals, dropout between layers."""

    def __init__(self, count: int = 9) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(count))
        self.leave = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        mask, hidden = (x > 0).float(), []
        for number, block in enumerate(self.blocks):
            y = block(x, 1 + number / 10, mask=mask)
            if number % 4 == 2:
                x = functional.dropout(x, 0.2) + y
            elif number % 4 == 3:
                x = y.add_(1)
            else:
                x = y
            hidden.append(x)
        return self.leave(torch.stack(hidden[-2:]).sum(0))


def chain(count: int = 9) -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(count)))


def made(make: Any, *arguments: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(*arguments)


def batch(model: nn.Module) -> torch.Tensor:
    width = WIDTH if isinstance(model, nn.Sequential) else 4
    return torch.randn(6, width, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(model: nn.Module, *, steps: int = 2) -> list[torch.Tensor]:
    """The gradients of some steps, the gradient of the input, and the buffers."""
    x = batch(model)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        for _ in range(steps):
            model(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def layers_in(model: nn.Module) -> list[Layer]:
    return [module for module in model.modules() if isinstance(module, Layer)]


STRATEGIES = ["memory", "speed", 1, 4, 9, "names"]


@pytest.mark.parametrize("make", [Net, chain])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_has_the_bits_of_a_plain_run(make, strategy):
    model, plain = made(make), made(make)
    if strategy == "names":
        strategy = ["blocks.1", "blocks.6"] if make is Net else ["1", "6"]
    handle = recompute_layers(model, strategy)
    assert all(map(torch.equal, gradients(model), gradients(plain)))
    runs = [layer.calls for layer in layers_in(model)]
    again = {i for s in handle.plan.segments if s.recomputed for i in range(s.start, s.stop)}
    assert runs == [4 if i in again else 2 for i in range(9)]


def test_plans_of_strategies_are_these():
    assert recompute_layers(made(Net), "memory").plan == sqrt_segments(9)
    assert recompute_layers(made(Net), 4).plan == equal_segments(9, 4)
    assert recompute_layers(made(Net), equal_segments(9, 2)).plan == equal_segments(9, 2)
    named = recompute_layers(made(Net), ["blocks.1", "blocks.6"])
    assert str(named.plan) == "(0 1) (2 3 4 5 6) 7 8"
    assert named.names == tuple(f"blocks.{i}" for i in range(9))
    several = nn.ModuleDict({"a": chain(2), "b": nn.ModuleList([nn.ModuleList(chain(2))])})
    assert recompute_layers(several).names == ("a.0", "a.1", "b.0.0", "b.0.1")


def test_speed_runs_no_product_again():
    counts = {}
    for strategy in ("speed", "memory", None):
        model = made(Net)
        if strategy is not None:
            recompute_layers(model, strategy)
        with Operators() as operators:
            gradients(model, steps=1)
        counts[strategy] = operators.counts[ADDMM]
    assert counts[None] == counts["speed"] == 2 + 2 * 9
    # early stop: the dropout after the last product needs it to run again
    assert counts["memory"] == 2 + 2 * 9 + 2 * 6


class Tanh(nn.Module):
    def __init__(self, live: LiveTensors) -> None:
        super().__init__()
        self.live = live

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.live.register(x.tanh())


@pytest.mark.parametrize(("count", "segments"), [(16, 4), (16, 8), (16, 1), (9, 3), (10, 4)])
def test_a_chain_keeps_the_memory_of_the_formula(count, segments):
    live, x = LiveTensors(), torch.ones(64, requires_grad=True)
    layers = nn.ModuleList(Tanh(live) for _ in range(count))
    handle = recompute_layers(layers, segments)
    for layer in layers:  # hooks make every layer end
        layer.register_forward_hook(lambda *_: None)
    y = x
    for layer in layers:
        y = layer(y)
    loss = y.sum()
    del y
    loss.backward()
    costs = [LayerCost(x.nbytes, x.nbytes, 1.0)] * count
    # tanh saves no input, so the input of the last segment is not kept, which the formula counts
    unsaved = x.nbytes if segments > 1 else 0
    assert live.peak_bytes == handle.plan.peak_bytes(costs) - unsaved
    del loss
    assert live.count() == 0


def saved_bytes(model: nn.Module) -> int:
    """The bytes of all tensors that are alive after a forward, without the parameters."""
    from braid.comm.autograd.layer_costs import PeakBytes

    x = batch(model)
    with PeakBytes([x, *model.parameters(), *model.buffers()]) as peak:
        before = peak.live.count()
        loss = model(x).sum()
        found = peak.live.count() - before
    loss.backward()
    return found


@pytest.mark.parametrize("make", [Net, chain])
def test_speed_keeps_more_than_memory_and_less_than_a_plain_run(make):
    plain, speed, memory = (made(make, 16) for _ in range(3))
    recompute_layers(speed, "speed")
    recompute_layers(memory, "memory")
    assert saved_bytes(plain) > saved_bytes(speed) > saved_bytes(memory)


def test_copies_are_independent_and_remove_restores_the_model():
    model = made(Net)
    assert "x" in inspect.signature(model.blocks[0].forward).parameters
    handle = recompute_layers(model)
    assert list(inspect.signature(model.blocks[0].forward).parameters) == ["x", "scale", "mask"]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for param in twin.parameters():
                param.mul_(2)
        twin.zero_grad()
        gradients(twin)
        assert [layer.calls for layer in twin.blocks] == [4] * 6 + [2] * 3
    assert all(layer.calls == 0 for layer in model.blocks)
    handle.remove()
    gradients(model)
    assert [layer.calls for layer in model.blocks] == [2] * 9
    recompute_layers(model)


def test_layers_may_run_in_any_order_and_without_gradients():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(9))
    plain = copy.deepcopy(layers)
    recompute_layers(layers)
    x = torch.randn(2, 3)
    losses = []
    for model in (layers, plain):
        a, b = model[0](x), model[0](x * 2)  # two calls of one layer, then the next for each
        c = model[1](a) + model[1](b)
        with torch.no_grad():
            e = model[2](c)
        d = model[5](model[4](c)) * model[2](c + e)
        (grad,) = torch.autograd.grad(d.sum(), a, retain_graph=True)
        losses.append((d + grad).sum())
        losses[-1].backward()
    assert torch.equal(*losses)
    for param, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (expected.grad is None)
        if param.grad is not None:
            assert torch.equal(param.grad, expected.grad)


def test_hooks_may_change_what_a_layer_returns():
    x, grads = torch.ones(2, 3, requires_grad=True), []
    layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(9))
    for layer in layers:
        layer.register_forward_hook(lambda _layer, _args, out: (torch.exp(out), out))
    for apply in (lambda: None, lambda: recompute_layers(layers)):
        apply()
        other, y = x, x
        for layer in layers:
            other, y = layer(y)
        (grad,) = torch.autograd.grad((other * y).sum(), x)
        grads.append(grad)
    assert torch.equal(*grads)


def test_it_works_inside_of_checkpoint_and_around_it():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(made(chain, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x)
            return x

    plain, inside, around = Outer(), Outer(), Outer()
    recompute_layers(around)
    for part in around.parts:
        recompute_layers(part, 2)
    recompute_layers(inside)

    def run(model: nn.Module, call: Any) -> list[torch.Tensor]:
        x = torch.ones(3, WIDTH, requires_grad=True) * torch.arange(3.0).unsqueeze(1)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            call(x).sum().backward()
        return [p.grad for p in model.parameters()]

    expected = run(plain, plain)
    assert all(map(torch.equal, run(inside, lambda x: checkpoint(inside, x)), expected))
    assert all(map(torch.equal, run(around, around), expected))


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: recompute_layers(nn.Linear(1, 1)), "Linear has no layers in an nn.Sequential"),
        (lambda: recompute_layers(made(Net), "space"), '"memory", "speed", a list of names .*space'),
        (lambda: recompute_layers(made(Net), ["enter"]), "no layers 'enter': .*: blocks.0, blocks.1"),
        (lambda: recompute_layers(made(Net), 10), "must be from 1 to 9, got 10"),
        (lambda: recompute_layers(made(Net), equal_segments(4, 2)), "must cover layers 0 to 9"),
        (lambda: recompute_layers(made(Net), policy="mm"), "MUST_SAVE, PREFER_SAVE"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(act, text):
    with pytest.raises(ConfigError, match=text):
        act()


def test_a_parameter_that_changes_before_backward_is_refused():
    model = made(chain)
    recompute_layers(model)
    loss = model(batch(model)).sum()
    with torch.no_grad():
        # backward does not read it, but the next layer's input depends on it
        model[0].down.bias.add_(1)
    with pytest.raises(RecomputeError, match=r"parameter down.bias of Layer has been changed"):
        loss.backward()


def test_the_handbook_has_the_table_that_its_example_prints(capsys):
    page = (ROOT / "docs/handbook/19-checkpointing.md").read_text()
    (shown,) = re.findall(r"\$ braid run -n 1 examples/65_\S+\n(.*?)```", page, re.DOTALL)
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        runpy.run_path(str(ROOT / "examples/65_recomputed_layers.py"), run_name="__main__")
    torch.set_num_threads(threads)
    rows = [_row(line) for line in shown.splitlines()[1:-1]]
    printed = [_row(line) for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [row[::2] for row in printed] == [row[::2] for row in rows]
    peaks = {strategy: peak for strategy, peak, _ in printed}
    assert peaks == pytest.approx({strategy: peak for strategy, peak, _ in rows}, rel=0.1)
    assert peaks["None"] > peaks["speed"] > peaks["memory"]


def _row(line: str) -> tuple[str, float, list[str]]:
    """The strategy, the peak, which depends a little on the version of torch, and the counts."""
    strategy, peak, *counts = line.rsplit(maxsplit=3)
    return strategy, float(peak), counts


def test_a_model_is_changed_once():
    model = made(Net)
    recompute_layers(model)
    with pytest.raises(ConfigError, match=r"blocks.8 are recomputed already: call remove\(\)"):
        recompute_layers(model, "speed")
