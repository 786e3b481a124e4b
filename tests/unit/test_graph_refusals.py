"""A model that cannot be captured, cut or replayed is refused with the operation and its line."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from braid.errors import ConfigError
from braid.parallel.graph import capture, segments
from plain_models import Cast, InPlace, Random, Shared, numbers


class Bag:
    """No container that anybody knows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Bagging(nn.Module):
    def forward(self, x: torch.Tensor) -> Bag:
        return Bag(x * 2)


class Adding(nn.Module):
    def forward(self, x: torch.Tensor, bag: Bag) -> torch.Tensor:
        return x + bag.x


def layer_drop(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x if torch.rand([]) < 2 else net.inner(x)


def drawn_in_python(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net.last(x) if random.random() < 2 else x


def from_numpy(_net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(np.ones(len(x) and 4, dtype=np.float32))


def cached(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net.adding(x, Bag(torch.ones(4)))


def hooked(_net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (x * 2).register_hook(lambda grad: grad * 2)
    return x


def averaged(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    net.mean = 0.9 * net.mean + x.mean().detach()
    return x - net.mean


def swapped(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(net.last, dict(net.inner.named_parameters()), (x,))


HERE = r".*test_graph_refusals.py:\d+"
CASES: dict[str, tuple[Any, str]] = {
    "item": (lambda _, x: x * x.mean().item(), rf"item\(\) at {HERE} makes control flow of the model depend on data"),
    "list": (lambda _, x: x * x[0].tolist()[0], rf"tolist\(\) at {HERE}"),
    "any": (lambda _, x: -x if x.any() else x, rf"a condition at {HERE}"),
    "equal": (lambda _, x: -x if torch.equal(x, x + 1) else x, rf"equal\(\) at {HERE}"),
    "index": (lambda _, x: x[int(x.argmax()) % 2 :], rf"int\(\) at {HERE}"),
    "array": (lambda _, x: x * np.asarray(x.detach()).sum(), rf"numpy\(\) at {HERE}"),
    "random": (layer_drop, rf"a condition at {HERE}"),
    "python": (drawn_in_python, rf"draws Python's random numbers before {HERE}"),
    "masked": (lambda _, x: x * len(x[x > 0]), rf"the shape of a tensor at {HERE} depends on data"),
    "nonzero": (lambda _, x: x * x.nonzero().shape[0], rf"the shape of a tensor at {HERE}"),
    "numpy": (from_numpy, rf"capture cannot see where the tensor used at {HERE} is made"),
    "object": (lambda net, x: net.bagging(x).x + 1, rf"the tensor used at {HERE}"),
    "cache": (cached, rf"adding\(\d+\) -> \d+ at {HERE} gets a Bag that the model creates"),
    "hook": (hooked, rf"register_hook\(\) at {HERE} would be lost"),
    "data": (lambda _, x: setattr(x, "data", x * 2) or x, rf"an assignment to .data at {HERE}"),
    "buffer": (averaged, "the model replaces its buffer mean between its modules"),
    "swapped": (swapped, rf"last is called at {HERE} with replaced parameters"),
    "vmap": (lambda _, x: torch.vmap(torch.sin)(x) + 1, rf"the tensor used at {HERE} is made"),
    "modulo": (lambda _, x: x.repeat(len(x) % 3 + 1, 1)[: len(x)], "but not as"),
    "flag": (lambda _, x: x.sum(0, keepdim=len(x) > 3), rf"at {HERE} has True for 4 rows and False"),
    "order": (lambda _, x: x.relu() if len(x) > 3 else x.tanh(), rf"calls tanh.* at {HERE} instead"),
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, glue: Any) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.bagging, self.adding, self.glue = Bagging(), Adding(), glue
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.glue(self, self.inner(x)))


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_a_capture_would_freeze_is_refused_with_its_line(name):
    glue, text = CASES[name]
    with torch.random.fork_rng(), pytest.raises(ConfigError, match=text):
        capture(Model(glue), torch.ones(4, 4))


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        return x, 1 / len(x)


def test_a_result_that_is_another_fraction_for_other_rows_is_refused():
    with pytest.raises(ConfigError, match=r"the result.* has the number 0.25 for 4 rows and 0.33"):
        capture(nn.Sequential(nn.Sequential(Mean())), torch.ones(4, 4))


def test_an_example_needs_tensors_and_rows():
    with torch.random.fork_rng():
        model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"the example has no tensors, got \(3,\)"):
        capture(model, 3)
    with pytest.raises(ConfigError, match=r"at least 3 rows .* got 2"):
        capture(model, torch.ones(2, 4))


def test_a_backward_hook_of_a_container_is_refused():
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="backward hooks of 0 would be lost"):
        capture(model, torch.ones(4, 4))


class Alone(nn.Module):
    """Calls no module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.linear.weight + self.linear.bias


def test_a_model_that_calls_no_module_is_one_part():
    with torch.random.fork_rng():
        model = Alone()
    graph, x = capture(model, torch.ones(4, 4)), torch.ones(2, 4)
    (part,) = segments(graph, 1)
    assert torch.equal(part(x), model(x))
    assert part.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(ConfigError, match="0 modules cannot be cut into 2 parts: use fewer stages"):
        segments(graph, 2)


class Late(nn.Module):
    """Writes to a tensor, or a view of it, after it has gone through another module."""

    def __init__(self, *, view: bool = False) -> None:
        super().__init__()
        self.view = view
        with torch.random.fork_rng():
            self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        x = first(x)
        y = second(x)
        if self.view:
            x[1:].mul_(2)
        else:
            x += 1
        return third(x + y)


def test_no_part_begins_between_a_tensor_and_a_write_to_it():
    with torch.random.fork_rng():
        graph = capture(InPlace(), **numbers(4))
    names = [node.name for node in graph.nodes]
    first, third, fourth = (names.index(f"layers.{i}") for i in (0, 2, 3))
    text = rf"a part cannot begin at {third}: add_\(.*\) -> \d+ at .*plain_models.py:\d+ writes to"
    assert len(segments(graph, 2, [0, fourth])) == 2
    with pytest.raises(
        ConfigError, match=r"__setitem__\(.*writes to.*Cut elsewhere, or use an out-of-place"
    ):
        segments(graph, 2, [0, names.index("__setitem__")])
    segments(graph, 2, [0, first + 1])
    segments(graph, 2, [0, third])
    with pytest.raises(ConfigError, match=text.replace(f"at {third}", f"at {third + 1}")):
        segments(graph, 2, [0, third + 1])
    graph = capture(Late(), torch.ones(4, 4))
    text = r"3 modules cannot be cut at 1 places into 3 parts: use fewer stages; add_.* writes to 1"
    with torch.random.fork_rng(), pytest.raises(ConfigError, match=text):
        segments(graph, 3)
    assert [len(part._nodes) for part in segments(graph, 2)] == [4, 1]
    graph = capture(Late(view=True), torch.ones(4, 4))
    assert [len(part._nodes) for part in segments(graph, 2)] == [5, 1]
    with pytest.raises(ConfigError, match=r"cannot be cut at 1 places .* writes to 1 in place"):
        segments(graph, 3)


def test_a_model_with_other_calls_in_evaluation_is_replayed_in_the_captured_mode_only():
    with torch.random.fork_rng():
        graph = capture(Random().train(), **numbers(4))
        (part,) = segments(graph, 1)
        part.train()
        part(numbers(4)["x"])
        part.eval()
        with pytest.raises(
            ConfigError, match="captured in training, and in evaluation the model c"
        ):
            part(numbers(4)["x"])


class Fickle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count = nn.Linear(4, 4), 1

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.inner(x),) * 1 + (x + 1,) * (self.count - 1)


def test_a_module_that_returns_more_than_when_it_was_captured_is_refused():
    with torch.random.fork_rng():
        model = nn.Sequential(Fickle())
        model[0].inner = nn.Identity()
    fickle = nn.Sequential(nn.Sequential(Fickle(), Fickle()))
    graph = capture(_First(fickle[0][0]), torch.ones(4, 4))
    fickle[0][0].count = 2
    with pytest.raises(ConfigError, match=r"inner.0\(0\) -> 1 at .* returned 1 tensors .* now 2"):
        segments(graph, 1)[0](torch.ones(4, 4))


class _First(nn.Module):
    def __init__(self, fickle: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList([fickle, Fickle()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[0](x)[0]


def test_the_modes_that_a_model_sets_are_part_of_the_graph():
    with torch.random.fork_rng():
        graph = capture(Cast(), **numbers(4))
    modes = {node.name: node.modes for node in graph.nodes if node.kind == "module"}
    assert modes["frozen"].grad is False
    assert modes["body.1"].autocast == (("cpu", True, torch.bfloat16),)
    assert modes["body.2"].autocast == ()
    assert modes["last"].grad is None


def test_each_call_draws_numbers_of_its_own():
    with torch.random.fork_rng():
        graph = capture(Random().train(), **numbers(4))
        assert "twice call 2" in capture(Shared(), **numbers(4)).labels()
    labels = graph.labels()
    assert len(set(labels)) == len(labels)
    assert "layers.0" in labels
    assert sum(label.startswith("dropout at ") for label in labels) == 3
