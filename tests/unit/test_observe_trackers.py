"""Numbers of a run reach each tracker, with the package's own calls; a missing package is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from observe_job import late_job, record_of, write_run

from braid import cli
from braid.errors import ConfigError
from braid.launch.observe.trackers import TRACKERS, open_tracker, send_run
from braid.runtime.clock import VirtualClock
from braid.runtime.metrics import MetricsFiles

ROWS = [
    {"step": 0, "unix_s": 100.0, "loss": 2.0, "a b/c:d": 1},
    {"step": 1, "unix_s": 101.0, "loss": None, "lr": 0.1},
    {"step": 5, "unix_s": 102.0, "loss": 1.0},
]


class Calls(list[Any]):
    """Calls of a stand-in package, as (name, arguments, keyword arguments)."""

    def recorder(self, name: str) -> Any:
        return lambda *args, **kwargs: self.append((name, args, kwargs))


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", late_job(), metrics=ROWS, git="abc")


@pytest.fixture
def package(monkeypatch):
    calls = Calls()

    def make(name: str, *functions: str) -> Calls:
        module = ModuleType(name)
        for function in functions:
            setattr(module, function, calls.recorder(function))
        monkeypatch.setitem(sys.modules, name, module)
        return calls

    return make


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_weights_and_biases_and_trackio_get_every_step(run, package, name):
    calls = package(name, "init", "log", "finish")
    assert send_run(run, open_tracker(name, "project"), clock=VirtualClock(0)) == 3
    (_, _, begun), *logged, ended = calls
    assert (begun["project"], begun["name"]) == ("project", "run")
    assert begun["config"]["command"] == "braid run -n 2 train.py --lr 0.1"
    assert begun["config"]["commit"] == "abc"
    assert logged == [
        ("log", ({"loss": 2.0, "a b/c:d": 1.0, "unix_s": 100.0},), {"step": 0}),
        ("log", ({"lr": 0.1, "unix_s": 101.0},), {"step": 1}),
        ("log", ({"loss": 1.0, "unix_s": 102.0},), {"step": 5}),
    ]
    assert ended == ("finish", (), {})


def test_mlflow_gets_names_that_it_takes(run, package):
    calls = package("mlflow", "set_experiment", "start_run", "log_params", "log_metrics", "end_run")
    send_run(run, open_tracker("mlflow", ""), clock=VirtualClock(0))
    assert calls[0] == ("set_experiment", ("braid",), {})
    assert calls[3] == ("log_metrics", ({"loss": 2.0, "a b/c_d": 1.0},), {"step": 0})
    assert [call[0] for call in calls][-1] == "end_run"


def test_tensorboard_gets_the_time_at_which_a_step_was_logged(run, package, monkeypatch):
    calls = package("tensorboard")
    writer = SimpleNamespace(
        add_text=calls.recorder("text"),
        add_scalar=calls.recorder("scalar"),
        close=calls.recorder("close"),
    )
    module = ModuleType("torch.utils.tensorboard")
    places = []
    module.SummaryWriter = lambda place: places.append(place) or writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    send_run(run, open_tracker("tensorboard", "logs"), clock=VirtualClock(0))
    assert places == ["logs/run"]
    scalars = [call for call in calls if call[0] == "scalar"]
    assert scalars[0] == ("scalar", ("loss", 2.0, 0), {"walltime": 100.0})
    assert len(scalars) == 4
    assert calls[-1][0] == "close"


def test_following_ends_with_the_run_and_keeps_the_last_step_until_a_later_one(tmp_path, package):
    calls = package("wandb", "init", "log", "finish")
    path = write_run(tmp_path / "run", [], metrics=ROWS[:2], outcome=None)

    class Clock(VirtualClock):
        def sleep(self, duration_s: float) -> None:
            del duration_s
            assert [call[2] for call in calls if call[0] == "log"] == [{"step": 0}]
            (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
            (path / "run.json").write_bytes(msgspec.json.encode(record_of(1)))

    assert send_run(path, open_tracker("wandb", ""), follow=True, clock=Clock(0)) == 3
    assert [call[2] for call in calls if call[0] == "log"] == [
        {"step": 0},
        {"step": 1},
        {"step": 5},
    ]


def test_following_a_run_without_launcher_ends_when_no_rank_writes_any_more(tmp_path, package):
    calls = package("wandb", "init", "log", "finish")
    path = write_run(tmp_path / "run", [], outcome=None)
    ranks = [MetricsFiles(path, VirtualClock()), MetricsFiles(path, VirtualClock())]
    looks = []

    class Clock(VirtualClock):
        def sleep(self, duration_s: float) -> None:
            del duration_s
            looks.append([call[2]["step"] for call in calls if call[0] == "log"])
            step = len(looks)
            if step <= 3:
                ranks[0].append(0, {"step": step, "loss": 1.0})
            if step <= 2:
                ranks[1].append(1, {"step": step, "loss": 3.0})
            if step == 3:
                ranks[1].close()
            if step == 4:
                ranks[0].close()

    assert send_run(path, open_tracker("wandb", ""), follow=True, clock=Clock(0)) == 3
    assert looks == [[], [], [1], [1, 2]]
    losses = [call[1][0]["loss"] for call in calls if call[0] == "log"]
    assert losses == [2.0, 2.0, 1.0]


def test_following_reads_each_line_once_and_no_events(tmp_path, package, monkeypatch):
    package("wandb", "init", "log", "finish")
    path = write_run(tmp_path / "run", late_job(), metrics=ROWS, outcome=None)
    opened: list[str] = []

    class Clock(VirtualClock):
        looks = 0

        def sleep(self, duration_s: float) -> None:
            del duration_s
            self.looks += 1
            if self.looks == 1:
                inner = Path.open
                monkeypatch.setattr(
                    Path, "open", lambda p, *a, **k: opened.append(p.name) or inner(p, *a, **k)
                )
            if self.looks == 3:
                (path / "run.json").write_bytes(msgspec.json.encode(record_of(1)))

    assert send_run(path, open_tracker("wandb", ""), follow=True, clock=Clock(0)) == 3
    assert set(opened) == {"metrics.jsonl", "run.json"}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named_with_its_extra(run, name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'braid-train\[{name}\]'"):
        send_run(run, open_tracker(name, ""), clock=VirtualClock(0))


def test_an_unknown_tracker_and_a_run_without_numbers_are_refused(tmp_path, capsys, package):
    assert cli.main(["report", str(tmp_path), "--to", "comet"]) == 2
    assert "unknown tracker comet: choose one of tensorboard, mlflow" in capsys.readouterr().err
    package("wandb", "init", "log", "finish")
    empty = write_run(tmp_path / "empty", [])
    assert cli.main(["report", str(empty), "--to", "wandb"]) == 2
    assert "has no numbers to send: log them with braid.log" in capsys.readouterr().err


def test_a_tracker_that_fails_is_named_with_the_place_of_the_numbers(run, package, monkeypatch):
    package("wandb", "init", "finish")

    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(sys.modules["wandb"], "log", fail, raising=False)
    with pytest.raises(
        ConfigError, match=r"failed after 0 steps with OSError: no network. The numbers are"
    ):
        send_run(run, open_tracker("wandb", ""), clock=VirtualClock(0))
