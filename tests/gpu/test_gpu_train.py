"""`braid train` and `braid profile` on a device: losses, MFU, resumes, meshes, predicted steps."""

from __future__ import annotations

import io
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_models import CONTEXT, SIZE

from braid.checkpoint import load
from braid.cli import main
from braid.comm import Group
from braid.plan.profiling import MeasuredMachines, MeasuredModel
from braid.plan.search import Estimator, Split, Training
from braid.programs.topology import find_device
from braid.runtime.rendezvous.environment import JobEnvironment
from braid.train.config import MODELS, TrainConfig
from braid.train.corpus import from_files
from braid.train.device import choose_device
from braid.train.gpt import flops_per_token
from braid.train.loop import Stopping, Trainer
from braid.train.profile_request import ProfileRequest
from braid.train.profile_worker import measured
from braid.train.reports import Reporter
from braid.train.server_loop import train_on_servers

BATCHES = {"cpu": (1, 2, 4), "cuda": (1, 4, 16)}
PROFILE_S = {"cpu": 0.1, "cuda": 2.0}
STEPS = 4
LOSSES_OF_ONE: dict[str, list[float]] = {}  # by device


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    picks = torch.randint(0, 40, (8000,), generator=torch.Generator().manual_seed(3)).tolist()
    file.write_text(" ".join(f"word{i}" for i in picks))
    return str(file)


def _reports(log_dir: str) -> list[dict[str, object]]:
    lines = Path(log_dir, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.launcher
def test_the_command_trains_and_resumes_on_the_device(
    tmp_path, monkeypatch, capsys, text, device, figures
):
    words = ["train", "--model", SIZE[device], "--device", device, "--dtype", "bf16"]
    words += ["--context", str(CONTEXT[device]), "--batch", "4", "--lr", "5e-4", "--warmup", "2"]
    words += ["--data", text, "--eval-samples", "4", "--sample-bytes", "4", "--log-dir", "run"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def braid(*more: str) -> str:
        assert main([*words, *more]) == 0
        return str(capsys.readouterr().out)

    name = choose_device(device).name
    out = braid("--steps", "6")
    assert f"on {name} in bf16" in out
    assert "\nMFU      of " in out  # short steps print no line
    out = braid("--steps", "8", "--resume", "auto")
    assert "resumed  run/checkpoints/step-00000006, step 6" in out
    assert "last bits may differ" not in out
    page = tmp_path / "report.html"
    words[:] = ["report", "run", "--out", str(page)]
    braid()
    assert f"on {name} in bf16" in page.read_text()
    assert "largest memory of a process" in page.read_text()
    assert ("largest memory on a GPU" in page.read_text()) == (device == "cuda")
    reports = _reports(str(tmp_path / "run"))
    start = next(report for report in reports if report["kind"] == "start")
    steps = [report for report in reports if report["kind"] == "step"]
    losses = [step["loss"] for step in steps]
    assert [step["step"] for step in steps] == [*range(1, 9)]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert all(step["mfu"] > 0 for step in steps)  # of a peak that was measured beside others
    if known := find_device(name):
        assert start["peak_source"] == f"{known.source}, bf16"
    figures(
        peak_source=start["peak_source"],
        step_ms=round(1e3 * statistics.median(step["step_s"] for step in steps[2:]), 2),
        mfu=round(statistics.median(step["mfu"] for step in steps[2:]), 4),
        first_loss=losses[0],
        last_loss=losses[-1],
    )


def _trained(group: Group, config: TrainConfig, resume: str = "") -> list[float]:
    """Train on all ranks, which share the device; rank 0 returns the losses."""
    place = choose_device(config.device, 0, group.size)
    metrics = Path(config.log_dir, "metrics.jsonl") if group.rank == 0 else None
    with Reporter(metrics, io.StringIO(), group.context.clock) as reporter:
        corpus = from_files(config.data)
        trainer = Trainer(config, corpus, group, reporter, Stopping(), place)
        if resume:
            trainer.resume(load(resume, group=group))
        trainer.run()
    states = [x for state in trainer._optimizer.state.values() for x in state.values() if x.dim()]
    held = [*trainer._model.parameters(), *states]
    assert {x.device for x in held} == {place.device}
    if metrics is None:
        return []
    return [report["loss"] for report in _reports(config.log_dir) if report["kind"] == "step"]


@pytest.fixture
def config(tmp_path: Path, text: str, device: str) -> TrainConfig:
    return TrainConfig(
        data=(text,),
        device=device,
        model="mini",
        steps=STEPS,
        batch=8,
        context=32,
        eval_every=0,
        checkpoint_every=0,
        sample_bytes=4,
        log_dir=str(tmp_path / "one"),
    )


def _step_times(
    group: Group, device: str, dtype: str, text: str
) -> list[tuple[int, float, float, float]]:
    """Return batch, predicted and measured seconds of a step, and MFU."""
    place, clock = choose_device(device), group.context.clock
    request = ProfileRequest(
        model=SIZE[device],
        context=CONTEXT[device],
        rows=BATCHES[device],
        seconds=PROFILE_S[device],
        dtype=dtype,
    )
    profile = measured(request, group, place)
    assert profile.host is not None
    assert (profile.device, profile.dtype) == (place.name, dtype)
    peak, _ = place.peak(dtype, clock)
    rows = []
    for batch in BATCHES[device]:
        machines = MeasuredMachines(profile.host)
        estimator = Estimator(MeasuredModel(profile), machines, Training(batch))
        config = TrainConfig(
            data=(text,),
            model=SIZE[device],
            context=CONTEXT[device],
            batch=batch,
            lr=1e-4,
            dtype=dtype,
        )
        reporter = Reporter(None, io.StringIO(), clock)
        trainer = Trainer(config, from_files(config.data), group, reporter, Stopping(), place)
        times = []
        for _ in range(8):
            began = time.perf_counter()
            trainer.one_step()  # returns when the device has done its work
            times.append(time.perf_counter() - began)
        taken_s = statistics.median(times[3:])
        flops = flops_per_token(MODELS[config.model], config.context) * batch * config.context
        predicted_s = estimator.estimate(Split()).seconds
        rows.append((batch, predicted_s, taken_s, flops / taken_s / peak))
    return rows


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_takes_as_long_as_its_profile_predicts(procs, device, figures, text, dtype):
    (rows,) = procs(1, _step_times, device, dtype, text)
    for batch, predicted_s, measured_s, mfu in rows:
        figures(
            batch=batch,
            dtype=dtype,
            predicted_ms=round(1e3 * predicted_s, 2),
            measured_ms=round(1e3 * measured_s, 2),
            error_percent=round(100 * (predicted_s / measured_s - 1), 1),
            mfu=round(mfu, 4),
        )
    if device == "cuda":
        for _, predicted_s, measured_s, _ in rows:
            assert 0.5 < predicted_s / measured_s < 2


def test_a_training_changes_its_device_at_a_checkpoint(procs, config):
    config = replace(config, checkpoint_every=1, keep=STEPS)
    (whole,) = procs(1, _trained, config)
    elsewhere = replace(config, device="cpu", log_dir=config.log_dir + "-cpu")
    (on_cpu,) = procs(1, _trained, elsewhere, f"{config.checkpoints}/step-00000002")
    assert on_cpu == pytest.approx(whole[2:], rel=1e-3)
    back = replace(config, log_dir=config.log_dir + "-back")
    (last,) = procs(1, _trained, back, f"{elsewhere.checkpoints}/step-00000003")
    assert last == pytest.approx(whole[3:], rel=1e-3)


def _losses_of_one(procs: Callable[..., list[Any]], config: TrainConfig) -> list[float]:
    """Return the losses of one process, which trains once for all tests."""
    if config.device not in LOSSES_OF_ONE:
        (LOSSES_OF_ONE[config.device],) = procs(1, _trained, config)
    return LOSSES_OF_ONE[config.device]


@pytest.mark.parametrize(
    "options",
    [{}, {"shard": 1}, {"shard": 3}, {"mesh": "tp=2"}, {"mesh": "pp=2"}],
    ids=["replicas", "zero1", "zero3", "tp", "pp"],
)
def test_ranks_that_share_the_device_train_like_one(procs, config, options):
    expected = _losses_of_one(procs, config)
    of_two = replace(config, **options, log_dir=config.log_dir + "-two")
    assert procs(2, _trained, of_two)[0] == pytest.approx(expected, rel=1e-3)


def _served(group: Group, config: TrainConfig) -> None:
    """Be the scheduler, the server or the worker, which is on the device."""
    member = SimpleNamespace(environment=JobEnvironment(), control=None)
    place = choose_device(config.device)
    train_on_servers(config, from_files(config.data), group, Stopping(), member, place)


def test_a_worker_of_a_parameter_server_trains_like_one_process(procs, config):
    expected = _losses_of_one(procs, config)
    served = replace(config, strategy="ps", log_dir=config.log_dir + "-served")
    procs(1 + served.num_helpers, _served, served)
    losses = [r["loss"] for r in _reports(served.log_dir) if r["kind"] == "step"]
    assert losses == pytest.approx(expected, rel=1e-3)
