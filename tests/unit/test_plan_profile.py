"""Profiles: what is counted is exact, what is measured is a line, and files are read strictly."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from braid.cli import main
from braid.errors import ConfigError
from braid.plan.pipedream import MachineLevel, PipeDreamPlan, parse_graph, partition, states_of
from braid.plan.plan_file import read_plan
from braid.plan.profiling import PerRows, profile_layers, read_profile
from braid.plan.profiling.picture import profile_picture
from braid.plan.profiling.profile import fitted
from braid.train import profiling
from braid.train.profile_request import ProfileRequest


def layers() -> list[tuple[str, nn.Module]]:
    shared = nn.Linear(16, 16)
    return [("in", nn.Linear(8, 16)), ("one", shared), ("act", nn.Tanh()), ("two", shared)]


@pytest.fixture(scope="module")
def profile():
    named = layers()
    for _, layer in named:
        for param in layer.parameters():
            param.grad = torch.ones_like(param)
    done = profile_layers(named, lambda n: torch.ones(n, 8), model="net", rows=(3, 5), seconds=0.02)
    assert all((p.grad == 1).all() for _, layer in named for p in layer.parameters())
    return done


def test_bytes_operations_and_parameters_are_exact(profile):
    first, one, act, two = profile.layers
    assert first.output_bytes == one.output_bytes == PerRows(0.0, 64.0)
    assert first.saved_bytes == PerRows(0.0, 64.0)
    assert [layer.param_bytes for layer in profile.layers] == [576, 1088, 0, 1088]
    assert [layer.flops_per_row for layer in profile.layers] == [256, 512, 0, 512]
    assert first.params == (0, 1)
    assert one.params == two.params == (2, 3)
    assert act.params == ()
    assert one.intensity(2) == pytest.approx(1024 / (1088 + 2 * 128))


class _Steps:
    """A clock with moments `ms` apart, in turn."""

    def __init__(self, *ms: int) -> None:
        self._now_ns, self._steps = 0, itertools.cycle(ms)

    def now_ns(self) -> int:
        self._now_ns += 1_000_000 * next(self._steps)
        return self._now_ns


@pytest.mark.parametrize(("ms", "least", "most"), [((2,), 0.0, 0.0), ((1, 1, 1, 1, 9), 0.2, 2.0)])
def test_the_spread_of_times_is_part_of_a_profile(ms, least, most):
    named = [("in", nn.Linear(8, 16)), ("act", nn.Tanh())]
    clock = _Steps(*ms)
    done = profile_layers(
        named, lambda n: torch.ones(n, 8), model="", rows=(1, 2), seconds=1.0, clock=clock
    )
    assert least <= done.spread <= most


def test_the_time_of_the_loss_is_a_part_of_the_last_layers():
    named = [("in", nn.Linear(8, 16)), ("out", nn.Linear(16, 4))]

    def layers_with(loss):
        options = {"model": "", "rows": (1, 2), "seconds": 0.1, "clock": _Steps(1)}
        return profile_layers(named, lambda n: torch.ones(n, 8), loss=loss, **options).layers

    (first, last), (same, longer) = layers_with(None), layers_with(lambda y: y.square().mean())
    assert same.forward_s == first.forward_s
    for name in ("forward_s", "input_grad_s"):
        assert getattr(longer, name).of(2) == pytest.approx(2 * getattr(last, name).of(2))


class Loop(nn.Module):
    """The same module takes another time with another number of turns."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.linear, self.turns = nn.Linear(16, 16), turns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.turns):
            x = self.linear(x)
        return x


def test_layers_that_look_alike_and_are_not_are_measured_each():
    named = [("in", nn.Linear(8, 16)), ("one", Loop(1)), ("many", Loop(60))]
    done = profile_layers(named, lambda n: torch.ones(n, 8), model="", rows=(3, 5), seconds=0.02)
    assert done.layers[2].forward_s != done.layers[1].forward_s


def test_times_are_of_kinds_that_are_there(profile):
    first, one, act, two = profile.layers
    assert all(layer.forward_s.of(4) > 0 for layer in profile.layers)
    assert first.input_grad_s.of(4) < one.input_grad_s.of(4)  # whose input needs no gradient
    assert two.forward_s == one.forward_s  # measured together
    assert act.backward_s(4) > 0


def test_a_profile_is_a_file_and_a_graph(profile, tmp_path):
    file = tmp_path / "profile.json"
    profile.write(file)
    assert read_profile(file) == profile
    graph = profile.as_graph(4)
    assert [node.output_bytes for node in graph.nodes.values()] == [256.0] * 4
    assert list(graph.edges.values()) == [("node2",), ("node3",), ("node4",), ()]


@given(
    st.floats(0, 1),
    st.floats(0, 1),
    st.lists(st.integers(1, 50), min_size=2, max_size=4, unique=True),
)
def test_a_line_is_fitted_exactly_and_never_below_zero(constant, per_row, rows):
    line = fitted(rows, [constant + per_row * n for n in rows])
    assert [line.of(n) for n in rows] == pytest.approx(
        [constant + per_row * n for n in rows], abs=1e-9
    )
    down = fitted(rows, [1 / n for n in rows])
    assert min(down.constant, down.per_row) >= 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "truncated"),
        ("{}", "missing required field `model`"),
        ('{"model": 3}', "Expected `str`, got `int` - at `$.model`"),
        ('{"wrong": 3}', "unknown field `wrong`"),
        ('{"braid": 99}', "Invalid enum value 99 - at `$.braid`"),
    ],
)
def test_what_is_no_profile_is_named(tmp_path, text, problem):
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is not a profile") as raised:
        read_profile(file)
    assert problem in str(raised.value)


def test_negative_costs_are_named(profile, tmp_path):
    file = tmp_path / "profile.json"
    profile.write(file)
    file.write_text(file.read_text().replace('"param_bytes": 576', '"param_bytes": -5'))
    with pytest.raises(ConfigError, match=r"`int` >= 0 - at `\$.layers\[0\].param_bytes`"):
        read_profile(file)


def test_rows_must_differ():
    for rows in ((2,), (3, 3), (0, 2)):
        with pytest.raises(ConfigError, match="at least two different positive numbers"):
            profile_layers(layers(), lambda n: torch.ones(n, 8), model="", rows=rows)


def test_a_layer_that_fails_is_named():
    broken = [*layers(), ("last", nn.Linear(3, 3))]
    with pytest.raises(ConfigError, match=r"layer last \(Linear\) could not be measured"):
        profile_layers(broken, lambda n: torch.ones(n, 8), model="net", rows=(1, 2))


def test_the_commands_make_a_plan_that_training_reads(tmp_path, capsys):
    profile, graph, plan = (str(tmp_path / name) for name in ("p.json", "g.txt", "plan.json"))
    command = ["profile", "--model", "gpt2-tiny", "--context", "8", "--seconds", "0.05"]
    assert main([*command, "--out", profile, "--graph", graph]) == 0
    shown = capsys.readouterr().out
    assert "tiny on cpu in fp32, 1 thread, 8 rows" in shown
    assert shown.count("Block") == 2
    assert len(parse_graph((tmp_path / "g.txt").read_text()).nodes) == 4
    command = ["plan", "pipedream", profile, "--machines", "2", "--straight", "--plan", plan]
    assert main(command) == 0
    read = read_plan(plan)
    assert read.replicas == (1, 1)
    assert sum(read.balance) == 4
    done = partition(
        states_of(read_profile(profile).as_graph(8)), [MachineLevel(2, 1e9)], straight=True
    )
    assert read == PipeDreamPlan.of(done, "tiny")
    assert "braid train --model tiny --plan" in capsys.readouterr().out
    assert main(["train", "--plan", plan, "--model", "mini"]) == 2
    assert "leave them out: --model mini (the plan has tiny)" in capsys.readouterr().err
    assert main(["train", "--plan", plan, "--mesh", "dp=2"]) == 2
    assert "leave them out: --mesh dp=2 (the plan has pp=2)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not a plan"),
        ('{"kind": "other", "replicas": [1], "balance": [2]}', "is not a plan"),
        ('{"replicas": [1], "balance": [2, 2]}', "is not a plan"),
        ('{"kind": "pipedream", "replicas": [1], "balance": [2, 2]}', "a number of at least 1"),
        ('{"kind": "pipedream", "replicas": [1, 0], "balance": [2, 2]}', "a number of at least 1"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, text, problem):
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_plan(file)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "no model is named"),
        (["--model", "gpt9"], "must be one of gpt2-tiny"),
        (["nowhere:make"], "No module named 'nowhere'"),
        (["--model", "gpt2-tiny", "--rows", "2"], "at least two different"),
        (
            ["--model", "gpt2-tiny", "--out", "nowhere/p.json"],
            "cannot be written: the directory does not exist",
        ),
    ],
)
def test_what_cannot_be_profiled_is_named(tmp_path, monkeypatch, capsys, arguments, problem):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments]) == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_captured_model_is_profiled_from_its_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiled_net.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n"
        "    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))\n"
        "    return net, torch.ones(3, 4)\n"
    )
    assert main(["profile", "profiled_net.py", "--seconds", "0.05", "--rows", "2", "5"]) == 0
    done = read_profile("profile.json")
    assert [layer.name for layer in done.layers] == ["0", "1", "2"]
    assert done.layers[2].output_bytes == PerRows(0.0, 8.0)
    assert json.loads((tmp_path / "profile.json").read_text())["rows"] == [2, 5]
    assert "profiled_net:make" in capsys.readouterr().out


def test_a_picture_colours_layers_by_their_time(profile):
    drawn = profile_picture(profile, 4)
    assert drawn.startswith("<svg")
    assert drawn.count("backward to weights") == len(profile.layers)
    assert "#cc3311" in drawn  # the slowest layer


def test_a_profile_of_a_known_model_is_kept(profile, tmp_path, monkeypatch):
    measured = []

    def measure(request):
        measured.append(request)
        return profile

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profiling, "profile_together", measure)
    requests = [
        ProfileRequest(num_ranks=2, model="tiny"),
        ProfileRequest(num_ranks=4, model="tiny"),
        ProfileRequest(num_ranks=2, target="train:make"),
    ]
    assert [profiling.cached_profile(request) for request in requests] == [(profile, "")] * 3
    again, note = profiling.cached_profile(requests[0])
    assert again == profile
    assert "profile of 0.0 h ago" in note
    profiling.cached_profile(requests[2])
    assert measured == [*requests, requests[2]]
