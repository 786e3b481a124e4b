"""Models divided by their graph follow what changes later: modes, gradients, memory, dtypes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training import said_by

from braid.comm import Group
from braid.parallel.tensor_parallel import parallelize, slicing_of
from support import seeded

WIDTH = 8
PLAN = {"^(up|gate)$": "column", "^down$": "row"}


class Layers(nn.Module):
    """Layers around any code."""

    def __init__(self, code: Callable[[Layers, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH)
        self.up = nn.utils.skip_init(nn.Linear, WIDTH, 4 * WIDTH)
        self.gate = nn.utils.skip_init(nn.Linear, WIDTH, 4 * WIDTH)
        self.down = nn.utils.skip_init(nn.Linear, 4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(4 * WIDTH))
        self.drop = nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(WIDTH))
        self.code = code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.code(self, x)


def filled(code: Callable[[Layers, torch.Tensor], torch.Tensor]) -> Layers:
    return drawn(Layers(code))


def drawn(model: Any) -> Any:
    return seeded.filled(model.double())


def batch(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)


def gap(group: Group, model: nn.Module, whole: nn.Module, x: torch.Tensor) -> float:
    """Largest gap of outputs and gradients, also those of the inputs, as a part of the largest."""
    inputs = (x.clone().requires_grad_(), x.clone().requires_grad_())
    for each in (model, whole):
        each.zero_grad()
    outputs = [each(own) for each, own in zip((model, whole), inputs, strict=True)]
    for out in outputs:
        out.square().sum().backward()
    pairs = [(outputs[0], outputs[1]), (inputs[0].grad, inputs[1].grad)]
    params = zip(model.parameters(), whole.parameters(), strict=True)
    for param, own in params:
        slicing, expected = slicing_of(param), own.grad
        assert (param.grad is None) == (expected is None)
        if slicing is not None and expected is not None:
            expected = slicing.part_of(expected, group.rank, group.size)
        if param.grad is not None:
            pairs.append((param.grad, expected))
    largest = max(expected.detach().abs().max() for _, expected in pairs)
    return max(float((got - expected).detach().abs().max() / largest) for got, expected in pairs)


def _mlp(m: Layers, x: torch.Tensor) -> torch.Tensor:
    x = m.first(x) * m.shift
    return m.down(functional.relu(m.up(x)) * torch.sigmoid(m.gate(x)))


def _states(group: Group) -> dict[str, float]:
    """Gaps after what may change between two steps; gradients stay from the step before."""
    model, whole = filled(_mlp).eval(), filled(_mlp).eval()
    model.first.requires_grad_(False)
    whole.first.requires_grad_(False)
    parallelize(model, group, PLAN, inputs=batch(3, 2))
    gaps = {"inputs with gradients": gap(group, model, whole, batch(3, 2))}
    with torch.no_grad():
        gaps["no_grad"] = (model(batch(3, 2)) - whole(batch(3, 2))).abs().max().item()
    for each in (model, whole):
        each.first.requires_grad_(True)
    gaps["layers in front trained from now on"] = gap(group, model, whole, batch(3, 2))
    for each in (model, whole):
        each.shift = each.shift * 3
    gaps["another buffer"] = gap(group, model, whole, batch(3, 2))
    for each in (model, whole):
        each.down.requires_grad_(False)
    gaps["one sample of one token"] = gap(group, model, whole, batch(1, 1))
    for each in (model, whole):
        each.float()
    gaps["float32"] = gap(group, model, whole, batch(2, 2).float()) / 1e7
    return gaps


def test_what_changes_between_steps_is_followed(world):
    for gaps in world(2, _states):
        assert {name: value for name, value in gaps.items() if not value < 1e-13} == {}


def _replaced(group: Group) -> list[str]:
    model = filled(_mlp)
    parallelize(model, group, PLAN, inputs=batch(3, 2))
    states = {name: 2 * value for name, value in model.state_dict().items()}
    texts = [said_by(lambda: torch.func.functional_call(model, states, (batch(3, 2),)))]
    first, model.first = model.first, nn.Identity()
    texts.append(said_by(lambda: model(batch(3, 2))))
    model.first = first
    model(batch(3, 2))
    return texts


@pytest.mark.filterwarnings("ignore:.*has only this rank's part")
def test_replaced_parameters_and_modules_are_refused(world):
    params, modules = world(2, _replaced)[0]
    assert "had its parameters replaced after parallelize" in params
    assert "the model had modules in it replaced after parallelize" in modules


def _recomputed(group: Group) -> float:
    model, whole = filled(_mlp), filled(_mlp)
    parallelize(model, group, PLAN, inputs=batch(3, 2))
    grads = []
    for each in (model, whole):
        x = batch(3, 2).requires_grad_()  # which leads to a graph of its own
        checkpoint(each, x, use_reentrant=False).square().sum().backward()
        grads.append(x.grad)
    return float((grads[0] - grads[1]).abs().max())


def test_a_divided_model_is_recomputed_in_backward(world):
    assert max(world(2, _recomputed)) < 1e-13


def _dropped(m: Layers, x: torch.Tensor) -> torch.Tensor:
    return m.down(m.drop(m.up(x)))


def _part_in_evaluation(group: Group) -> float:
    model, whole = filled(_dropped), filled(_dropped)
    model.eval()
    parallelize(model, group, PLAN, inputs=batch(3, 2))
    model.train()
    model.drop.eval()
    whole.drop.eval()
    return gap(group, model, whole, batch(3, 2))


def test_a_module_in_evaluation_inside_of_a_model_in_training_drops_nothing(world):
    assert max(world(2, _part_in_evaluation)) < 1e-13


def _body(group: Group) -> float:
    whole = nn.Sequential(filled(lambda m, x: m.first(x)), filled(_mlp), filled(_mlp))
    model = copy.deepcopy(whole)
    parallelize(model[1], group, PLAN, inputs=batch(3, 2))
    return gap(group, model, whole, batch(3, 2))


def test_a_divided_model_may_be_a_part_of_another(world):
    assert max(world(2, _body)) < 1e-13


def _refilled(m: Layers, x: torch.Tensor) -> torch.Tensor:
    """Changes values in place through views, and after they were moved."""
    hidden = m.up(x) * 1
    before = hidden.mean(-1, keepdim=True)  # needs all of them
    hidden[:, 0] = 0
    hidden.masked_fill_(hidden < -1, -1)
    moved = torch.zeros_like(hidden)
    moved[:, 1:] = hidden[:, :-1]
    after = hidden.mean(-1, keepdim=True)
    out = m.down(moved)
    out += x
    return out * before + after


def _collected(m: Layers, x: torch.Tensor) -> torch.Tensor:
    """Writes a divided value into a whole one, which has gradients from then on."""
    hidden = m.up(x)
    out = torch.zeros(hidden.shape, dtype=x.dtype)
    out[:, 1:] = hidden[:, :-1]
    return m.down(out)


def _mixed(m: Layers, x: torch.Tensor) -> torch.Tensor:
    hidden, gate = m.up(x), m.gate(x)
    hidden = torch.max(hidden, gate) + m.scale.expand_as(hidden)
    return m.down(hidden * m.scale.type_as(hidden) + m.scale.sum().to(hidden))


def _operators(m: Layers, x: torch.Tensor) -> torch.Tensor:
    query, key = (y.unflatten(-1, (4, WIDTH)) for y in (m.up(x), m.gate(x)))
    scores = torch.einsum("b t h e, b s h e -> b h t s", query, key).softmax(-1)
    hidden = torch.einsum("bhts,bshe->bthe", scores, query.roll(1, 1)).flatten(2)
    hidden = functional.prelu(hidden, m.scale[:1]) / query.norm(dim=-1).mean(-1, keepdim=True)
    return m.down(hidden.mT.roll(1).mT)


def _code(group: Group, code: Any) -> float:
    model, whole = filled(code), filled(code)
    parallelize(model, group, PLAN, inputs=batch(3, 2))
    return gap(group, model, whole, batch(3, 2))


@pytest.mark.parametrize("code", [_refilled, _collected, _mixed, _operators])
def test_code_of_any_kind_computes_the_same(world, code):
    assert max(world(2, _code, code)) < 1e-13


class Channels(nn.Module):
    """A gated layer with packed halves, between convolutions of which one has a channel each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.skip_init(nn.Conv1d, WIDTH, 4 * WIDTH, 1)
        self.each = nn.utils.skip_init(nn.Conv1d, 4 * WIDTH, 4 * WIDTH, 3, padding=1, groups=32)
        self.last = nn.utils.skip_init(nn.Conv1d, 4 * WIDTH, WIDTH, 1)
        self.packed = nn.utils.skip_init(nn.Linear, WIDTH, 4 * WIDTH)
        self.down = nn.utils.skip_init(nn.Linear, 2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(self.each(self.first(x.mT).relu()).relu()).mT
        return self.down(functional.glu(self.packed(x)))


def _channels(group: Group) -> tuple[dict[str, str], float]:
    model = drawn(Channels())
    whole = copy.deepcopy(model)
    kinds = dict(parallelize(model, group, inputs=batch(3, 5)))
    return kinds, gap(group, model, whole, batch(3, 5))


def test_convolutions_of_single_channels_and_packed_gates_are_divided(world):
    for kinds, largest in world(2, _channels):
        assert kinds == {
            "first": "column",
            "each": "column",
            "last": "row",
            "packed": "column:2",
            "down": "row",
        }
        assert largest < 1e-13


def _lost(m: Layers, x: torch.Tensor) -> torch.Tensor:
    hidden = m.up(x) * 1
    hidden[..., 0] = 0
    return m.down(hidden)


def _refused(group: Group) -> str:
    model = filled(_lost)
    said = said_by(lambda: parallelize(model, group, PLAN, inputs=batch(3, 2)))
    assert slicing_of(model.up.weight) is None, "nothing is changed"
    return said


def test_a_change_that_would_be_lost_is_refused(world):
    (said, _) = world(2, _refused)
    assert "changes a value in place by aten.fill_ (" in said
    assert "test_parallelize_states.py" in said
    assert "compute a new value" in said


def _random(m: Layers, x: torch.Tensor) -> torch.Tensor:
    hidden = functional.dropout(m.up(x), 0.5, inplace=True)
    hidden = functional.dropout1d(hidden.transpose(1, 2), 0.5).transpose(1, 2)
    hidden = hidden * (torch.rand_like(hidden) > 0.3) * torch.bernoulli(hidden.detach().sigmoid())
    return m.down(functional.rrelu(hidden, training=True))


def _drawn(group: Group) -> float:
    model, whole = filled(_random), filled(_random)
    parallelize(model, group, PLAN, inputs=batch(3, 2))
    torch.manual_seed(3)
    got = model(batch(3, 2))
    torch.manual_seed(3)
    return float((got - whole(batch(3, 2))).detach().abs().max())


@pytest.mark.procs
@pytest.mark.filterwarnings("ignore:no rule can shard")
def test_random_numbers_are_those_of_one_process(procs):
    assert max(procs(2, _drawn)) < 1e-13


def _pickled(group: Group) -> list[str]:
    by_modules, by_graph = filled(_mlp), filled(_mlp)
    parallelize(by_modules, group, PLAN)
    parallelize(by_graph, group, PLAN, inputs=batch(3, 2))
    return [said_by(lambda model=model: pickle.dumps(model)) for model in (by_modules, by_graph)]


def test_a_divided_model_is_not_pickled(world):
    for text in world(2, _pickled)[0]:
        assert "cannot be pickled: save its state_dict()" in text
