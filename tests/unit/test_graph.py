"""A captured model is the model, for any rows; what would be frozen is refused with its line."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from braid.errors import ConfigError
from braid.parallel.graph import CapturedGraph, Scaled, capture, segments, share_modules
from braid.parallel.graph.skips import skips_of, use_skips
from graph_model import Model, Output, tokens
from plain_models import UNet, images


@pytest.fixture
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield Model().eval()


def replay(graph: CapturedGraph, parts: int, *batch: torch.Tensor) -> Any:
    value: Any = batch
    for segment in segments(graph, parts):
        value = segment(value)
    return value


@pytest.mark.parametrize("parts", [1, 2, 4, 7])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_replay_in_any_parts_equals_the_model_for_any_rows(model, parts, rows):
    graph = capture(model, tokens(4))
    found, expected = replay(graph, parts, tokens(rows)), model(tokens(rows))
    assert isinstance(found, Output)
    assert all(map(torch.equal, found, expected))
    keep = torch.rand(rows, 5, generator=torch.Generator().manual_seed(1)) > 0.3
    masked = capture(model, tokens(4), keep=torch.ones(4, 5) > 0)
    assert torch.equal(
        replay(masked, parts, tokens(rows), keep).logits, model(tokens(rows), keep=keep).logits
    )


def test_modes_and_modules_stay_those_of_the_model(model):
    graph = capture(model, tokens(4))
    assert not {"_call_impl", "_compiled_call_impl"} & vars(model.blocks[0]).keys()
    assert graph.modules["blocks.2"] is model.blocks[2]
    model.train()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = model(tokens(6)).logits
        torch.manual_seed(3)
        assert torch.equal(replay(graph, 2, tokens(6)).logits, expected)


def test_parts_have_the_parameters_under_their_names_and_shared_ones_stay_shared(model):
    first, *_, last = segments(capture(model, tokens(4)), 4)
    names = {
        name
        for part in segments(capture(model, tokens(4)), 4)
        for name, _ in part.named_parameters()
    }
    assert names == {name for name, _ in model.named_parameters()} | {"head.weight"}
    assert first.get_parameter("token.weight") is last.get_parameter("head.weight")


def test_values_that_skip_parts_cross_every_cut_between(model):
    graph = capture(model, tokens(4))
    crossing = [len(graph.crossing(cut)) for cut in graph.cuts(7)]
    assert crossing[0] == 1
    assert max(crossing) >= 3  # activations, mask, and the count of rows
    assert any(
        isinstance(x, Scaled)
        for node in graph.nodes
        for x in node.tree[0][1:]
        + tuple(y for arg in node.tree[0] if isinstance(arg, (tuple, list)) for y in arg)
    )


class Conditional(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(4, 4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.how == "item":
            return x * x.mean().item()
        if self.how == "condition" and x.sum() > 0:
            return -x
        if self.how == "half":
            return x.expand(len(x), 4).narrow(0, 0, len(x) // 2)
        if self.how == "float":
            return x * (1 / len(x))
        if self.how == "rows" and len(x) % 2:
            return functional.relu(x)
        return x


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("item", r"item\(\) at .*test_graph.py:\d+ makes control flow of the model depend on data"),
        (
            "condition",
            r"a condition at .*test_graph.py:\d+ makes control flow of the model depend on data",
        ),
        ("half", "depends on the number of rows, but not as"),
        ("float", r"__mul__.*has|mul.*has the number 0.25 for 4 rows"),
        ("rows", "for one row less than 4, the model makes 2 calls instead of 1"),
    ],
)
def test_what_depends_on_data_or_takes_another_way_is_refused(how, text):
    with pytest.raises(ConfigError, match=text):
        capture(Conditional(how), torch.ones(4, 4))


def test_one_row_and_more_parts_than_modules_are_refused(model):
    with pytest.raises(ConfigError, match="pass an example with at least 3 rows"):
        capture(model, tokens(2))
    graph = capture(model, tokens(4))
    with pytest.raises(ConfigError, match="8 modules cannot be cut into 9 parts"):
        segments(graph, 9)
    with pytest.raises(ConfigError, match="cuts must be ascending indices"):
        segments(graph, 2, [1, 3])
    with pytest.raises(ConfigError, match="captured with 1 input tensors, got 2"):
        segments(graph, 1)[0]((tokens(2), tokens(2)))


class Positions(nn.Module):
    """Has tensors of its own between its modules, at the top and below, kept or not, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.body.gain = nn.Parameter(torch.randn(4))
        self.body.register_buffer("shift", torch.randn(4))
        self.pos_emb = nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.constant = torch.full((4,), 0.5)
        self.register_buffer("version", torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second, third = self.body.layers
        x = second(first(x - self.mean) * self.mask + self.pos_emb)
        x = torch.nn.functional.linear(x, first.weight)  # of a module in another part
        return third(x * self.body.gain + self.body.shift) + self.constant, self.version


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_tensors_between_modules_are_saved_and_loaded_with_the_parts(parts):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, other = Positions(), Positions()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    whole, kept = model.state_dict(), list[str]()
    value: Any = (x,)
    for part, own in zip(
        segments(capture(other, x), parts), segments(capture(model, x), parts), strict=True
    ):
        state = own.state_dict()
        assert all(torch.equal(tensor, whole[name]) for name, tensor in state.items())
        kept += state
        copied = copy.deepcopy(part).double()
        copied.load_state_dict(state)
        value = copied(tuple(v.double() for v in value) if isinstance(value, tuple) else value)
    assert set(kept) == set(whole)
    expected = model.double()(x.double())
    assert torch.allclose(value[0], expected[0], atol=1e-6)
    assert value[1] == 3.0


def test_parts_that_share_their_modules_load_and_move_as_one():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, other = Positions(), Positions()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    parts = segments(capture(other, x), 3)
    whole = nn.Module()
    for part in parts:
        share_modules(whole, part)
    assert whole.state_dict().keys() == model.state_dict().keys()
    assert {name for name, _ in whole.named_buffers()} == {
        name for name, _ in model.named_buffers()
    }
    whole.load_state_dict(model.state_dict(), assign=True)
    value: Any = (x,)
    for part in parts:
        value = part(value)
    assert torch.equal(value[0], model(x)[0])
    whole.double()
    value = (x.double(),)
    for part in parts:
        value = part(value)
    assert value[0].dtype == torch.float64


def test_a_model_without_children_is_one_part():
    with torch.random.fork_rng():
        net = nn.Linear(4, 2)
    x = torch.ones(3, 4)
    assert torch.equal(replay(capture(net, x), 1, x), net(x))


def test_copies_of_parts_hand_values_past_each_other():
    with torch.random.fork_rng():
        model = UNet()
        parts = [copy.deepcopy(part) for part in segments(capture(model, **images(4)), 4)]
    value: Any = images(3)["x"]
    with use_skips({}):
        for part in parts:
            value = part(value)
    assert torch.equal(value, model(**images(3)))
    stashes, pops = zip(*map(skips_of, parts), strict=True)
    assert [list(map(len, keys)) for keys in (stashes, pops)] == [[1, 0, 0, 0], [0, 0, 1, 0]]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Doubling(nn.Module):
    """Runs `meanwhile` in the midst of its forward."""

    def __init__(self, meanwhile: Any = lambda: None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.meanwhile = meanwhile

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meanwhile()
        return Doubled.apply(self.layer(x))


def test_overlapping_captures_of_two_threads_leave_torch_as_it_was():
    own = vars(torch.autograd.Function)["apply"]
    second_runs, first_ended = threading.Event(), threading.Event()
    graphs: list[CapturedGraph] = []

    def capture_doubling(meanwhile: Any) -> None:
        graphs.append(capture(Doubling(meanwhile), torch.ones(4, 3)))

    def outlast_the_first() -> None:
        second_runs.set()
        first_ended.wait(60)

    second = threading.Thread(target=capture_doubling, args=(outlast_the_first,))

    def start_the_second() -> None:
        if not second.ident:
            second.start()
        second_runs.wait(60)

    capture_doubling(start_the_second)
    first_ended.set()
    second.join()
    assert vars(torch.autograd.Function)["apply"] is own
    assert [graph.nodes[-1].target.__name__ for graph in graphs] == ["Doubled"] * 2
