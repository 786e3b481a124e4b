"""Written stages are the model: outputs, gradients and buffers; what has no spelling is refused."""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from braid.cli import main
from braid.errors import ConfigError
from braid.parallel.graph import capture
from braid.parallel.graph.conversion import Made, convert, load_model
from braid.parallel.graph.source import stage_source
from capture_checks import check_written
from plain_models import MODELS, Cast, Checkpointed, Hidden, Layer, Random, UNet, images, numbers

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", MODELS)
def test_written_stages_have_the_outputs_and_gradients_of_the_model(name, tmp_path):
    make, batch = MODELS[name]
    check_written(make, batch, 3 if name != "cast" else 2, tmp_path / "out")


class Small(nn.Module):
    """Uses operators, methods, functions, a parameter and a number that depends on the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        first, second = self.layers
        x = torch.relu(first(x)) * self.scale
        y = second(2 - x.view(len(x) * 2, 2).reshape(-1, 4))
        return {"sum": (x @ y.T).sum(1, keepdim=True), "last": y[..., -1] ** 2}


EXPECTED = '''\
"""Stage 1 of 2 of models:make; `braid convert` wrote it."""

from torch import nn

from braid.parallel.graph import part_of

MODULES = (
    'layers.1',
)
TENSORS = ()


class Stage1(nn.Module):
    """Calls modules of the model, under their names there."""

    def __init__(self, model):
        super().__init__()
        self.model = part_of(model, MODULES, TENSORS)
        self.training = model.training

    def forward(self, values):
        x4, x7 = values
        x8 = self.model.layers[1](x7)  # line 3
        x9 = x8.T  # line 4
        x10 = x4 @ x9  # line 4
        x11 = x10.sum(1, keepdim=True)  # line 4
        x12 = x8[..., -1]  # line 4
        x13 = x12 ** 2  # line 4
        return {'sum': x11, 'last': x13}
'''
BODY = """\
    def forward(self, x):
        rows = x.shape[0]
        x1 = self.model.layers[0](x)  # line 2
        x2 = torch.relu(x1)  # line 2
        x4 = x2 * self.model.scale  # line 2
        x5 = x4.view(2 * rows, 2)  # line 3
        x6 = x5.reshape(-1, 4)  # line 3
        x7 = 2 - x6  # line 3
        return x4, x7
"""


def test_a_stage_is_written_as_straight_lines():
    with torch.random.fork_rng():
        model = Small()
    graph = capture(model, torch.ones(4, 4))
    _, begin = inspect.getsourcelines(Small.forward)
    first, second = (
        re.sub(
            r"test_graph_conversion.py:(\d+)",
            lambda line: f"line {int(line[1]) - begin}",
            stage_source(model, graph, graph.cuts(2), i, "models:make"),
        )
        for i in range(2)
    )
    assert second == EXPECTED
    assert first.endswith(BODY)


class Clash(nn.Module):
    """Has an argument with the name of a module that its code needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, plain_models: torch.Tensor) -> torch.Tensor:
        hidden = Hidden(plain_models, {"seen": []})
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.state


def test_an_argument_does_not_hide_a_module(tmp_path):
    check_written(Clash, lambda rows: {"plain_models": numbers(rows)["x"]}, 2, tmp_path / "out")
    assert "forward(self, x0)" in (tmp_path / "out" / "stage0.py").read_text()


def test_a_model_with_other_calls_in_evaluation_is_written_as_it_was_captured(tmp_path):
    with torch.random.fork_rng():
        made = Made(Random().train(), (numbers(4)["x"],), {}, __name__, "make")
        convert(made, 2, tmp_path / "out")
    assert "torch.rand(rows, 6)" in (tmp_path / "out" / "stage0.py").read_text()


def test_modes_and_checkpoints_are_written():
    with torch.random.fork_rng():
        texts = []
        for model in (Checkpointed(), Cast()):
            graph = capture(model, **numbers(4))
            texts.append(stage_source(model, graph, [0], 0, "models:make"))
    assert "x2 = checkpoint(self.model.blocks[1], x1, use_reentrant=False)" in texts[0]
    assert "with torch.no_grad():\n            x1 = self.model.frozen(x)" in texts[1]
    assert "with torch.autocast('cpu', dtype=torch.bfloat16):" in texts[1]


def test_stages_share_the_parameters_of_the_model_and_have_no_others():
    with torch.random.fork_rng():
        model = Small()
    graph = capture(model, torch.ones(4, 4))
    names: dict[str, torch.Tensor] = {}
    for i in range(2):
        space: dict[str, Any] = {}
        exec(stage_source(model, graph, graph.cuts(2), i, "models:make"), space)
        stage = space[f"Stage{i}"](model)
        assert set(stage.model.state_dict()) <= set(model.state_dict())
        names |= dict(stage.model.named_parameters())
    assert names.keys() == dict(model.named_parameters()).keys()
    assert all(names[name] is p for name, p in model.named_parameters())


class Plain:
    """An object without a literal."""


class Gate(nn.Module):
    def forward(self, x: torch.Tensor, how: Any) -> torch.Tensor:
        return how(x) if callable(how) else x


class Odd(nn.Module):
    """Gives its module something that has no spelling."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.gate, self.last, self.given = Gate(), nn.Linear(4, 4), given
        self.loose = [torch.ones(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.given == "loose":
            x = x + self.loose[0]
        return self.last(self.gate(x, self.given))


def _closure() -> Callable[[torch.Tensor], torch.Tensor]:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return twice


HERE = r"gate\(\d\) -> \d at .*test_graph_conversion.py:\d+ cannot be written as code: "


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda x: x + 1, HERE + r".*<lambda>.* cannot be imported: define it with a name"),
        (_closure(), HERE + r".*twice.* cannot be imported: define it with a name"),
        (partial(torch.add, other=1), HERE + "functools.partial.* cannot be imported"),
        (Plain(), HERE + r".*Plain object.* \(Plain\) cannot be written as Python source"),
        ("loose", r"add\(0, 1\) -> 2 at .*uses a tensor of shape \[4\] that no module owns"),
    ],
    ids=["lambda", "closure", "partial", "object", "tensor"],
)
def test_a_call_without_a_spelling_is_refused_by_name_and_line(given, text, tmp_path):
    with torch.random.fork_rng():
        made = Made(Odd(given), (torch.ones(4, 4),), {}, __name__, "make")
    with pytest.raises(ConfigError, match=text):
        convert(made, 2, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_functions_with_a_name_and_special_numbers_are_written(tmp_path):
    with torch.random.fork_rng():
        for given in (torch.relu, float("inf"), torch.float16, torch.device("cpu"), 1 + 2j):
            made = Made(Odd(given), (torch.ones(4, 4),), {}, __name__, "make")
            out = tmp_path / str(id(given))
            convert(made, 1, out)


def unet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return UNet(), images(4)


@pytest.fixture
def models(monkeypatch):
    """A module of the user, with functions that return models and what are none."""
    module = types.ModuleType("users_models")
    module.__file__ = __file__
    monkeypatch.setitem(sys.modules, "users_models", module)
    monkeypatch.setattr("inspect.getsourcefile", lambda _module: __file__)
    vars(module).update(unet=unet, none=lambda: None, pair=lambda: (1, 2), number=3)
    with torch.random.fork_rng():
        yield


def test_the_command_writes_stages_and_configurations(models, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", "users_models:unet", "--stages", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "stage0.py: down.0 to middle, 6 calls, 992 parameters" in printed
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md", "data_parallel.json", "fused.py", "hybrid_parallel.json",
        "model_parallel.json", "stage0.py", "stage1.py", "stage2.py", "train.py",
    ]  # fmt: skip
    meshes = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    assert {name: (config["mesh"], config["balance"]) for name, config in meshes.items()} == {
        "data_parallel": ({"pp": 1, "dp": 2}, [3]),
        "model_parallel": ({"pp": 3, "dp": 1}, [1, 1, 1]),
        "hybrid_parallel": ({"pp": 3, "dp": 2}, [1, 1, 1]),
    }
    assert (
        f"`braid run -n 6 {out}/train.py {out}/hybrid_parallel.json`"
        in (out / "README.md").read_text()
    )
    assert main(["convert", "users_models:unet", "--out", str(out)]) == 2
    assert "choose another directory, or remove them" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("users_models", "a model is given as module:function"),
        ("users_models:", "a model is given as module:function"),
        ("no_such_module_of_users:make", "No module named 'no_such_module_of_users'"),
        ("users_models:make", "the module users_models has no function make"),
        ("users_models:number", "the module users_models has no function number"),
        ("users_models:none", "must return a model and its example arguments, got NoneType"),
        ("users_models:pair", "must return a model and its example arguments, got tuple"),
    ],
)
def test_a_target_that_is_no_model_is_refused(models, target, text):
    with pytest.raises(ConfigError, match=text):
        load_model(target)


def test_the_example_of_the_readme_is_what_the_command_writes(tmp_path, monkeypatch, capsys):
    page = (ROOT / "src/braid/parallel/graph/README.md").read_text()
    (model,) = re.findall(r"```python\n(# residual.py\n.*?)```", page, re.DOTALL)
    ((command, printed),) = re.findall(r"```console\n\$ braid (.*?)\n(.*?)```", page, re.DOTALL)
    (stage,) = re.findall(r"```python\n(# net/stage1.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "residual.py").write_text(model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with torch.random.fork_rng():
        assert main(command.split()) == 0
    assert capsys.readouterr().out == printed
    assert stage.removeprefix("# net/stage1.py\n") in (tmp_path / "net/stage1.py").read_text()


class Counting(nn.Module):
    """Keeps a number between its calls that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * self.calls


def test_stages_that_are_not_the_model_are_not_written(tmp_path):
    with torch.random.fork_rng():
        made = Made(nn.Sequential(Counting(), Counting()), (), numbers(4), __name__, "make")
    made = made._replace(args=tuple(made.kwargs.values()), kwargs={})
    with pytest.raises(ConfigError, match="return another result than the model"):
        convert(made, 2, tmp_path / "out")
    assert not (tmp_path / "out").exists()
