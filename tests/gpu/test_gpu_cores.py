"""Many ranks on the cores of the machine with the GPU; a tiny form with `--device cpu`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from gpu_models import STEPS, lost, mlp, rows
from torch import nn

from braid import Pipeline
from braid.cli import main
from braid.comm import Group
from braid.parallel.data_parallel import DistributedDataParallel

MIN_CORES = 8


class Scale(NamedTuple):
    """Sizes of the tests.

    Attributes:
        ranks: Ranks of a training.
        crowd: Ranks that outnumber the cores.
        rounds: Barriers and sums of the crowd.
        bench: Options of `braid bench comm`.
    """

    ranks: int
    crowd: int
    rounds: int
    bench: str


TINY = Scale(2, 4, 20, "-n 2 --operations all_reduce --sizes 1KiB --rounds 1")
WHOLE = Scale(
    8,
    32,
    200,
    "-n 4 8 16 --operations all_reduce all_gather --sizes 1KiB 256KiB 16MiB --rounds 3",
)


@pytest.fixture
def scale(device: str) -> Scale:
    """Sizes that fit the machine."""
    if device == "cpu":
        return TINY
    cores = len(os.sched_getaffinity(0))
    if cores < MIN_CORES:
        pytest.skip(f"this machine has {cores} cores, and 8 ranks need {MIN_CORES}")
    return WHOLE


@pytest.mark.launcher
def test_collectives_beside_gloo(scale, figures, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    words = ["bench", "comm", *scale.bench.split(), "--no-plot", "--out", str(tmp_path)]
    assert main(words) == 0
    report = json.loads((tmp_path / "comm.json").read_text())
    for row in report["rows"]:
        figures(
            operation=row["operation"],
            ranks=row["ranks"],
            nbytes=row["nbytes"],
            gloo_us=round(1e6 * row["seconds"]["gloo"], 1),
            **{f"{library}_x": round(ratio, 2) for library, ratio in row["ratio"].items()},
        )
    assert {"braid", "registered", "torch"} <= set(report["rows"][0]["ratio"])
    if out := os.environ.get("OUT"):
        (Path(out) / "comm.json").write_text(json.dumps(report))


def _trains(group: Group) -> list[torch.Tensor]:
    model = mlp("cpu")
    wrapped = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(rows("cpu", 100 * step + group.rank)).square().mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def _trained_here(ranks: int) -> list[torch.Tensor]:
    model = mlp("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(rows("cpu", 100 * step + rank)).square().mean() / ranks).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def test_replicas_train_like_one_process(procs, scale):
    expected = _trained_here(scale.ranks)
    for found in procs(scale.ranks, _trains):
        assert lost(found, expected) < 1e-5


def _deep(num_layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_layers)]
    return nn.Sequential(*layers)


def _stage(group: Group, schedule: str) -> dict[str, torch.Tensor]:
    pipeline = Pipeline(
        _deep(group.size),
        num_microbatches=2 * group.size,
        schedule=schedule,
        group=group,
    )
    x = rows("cpu", 0, 4 * group.size)
    pipeline.step(x, torch.zeros_like(x), loss=nn.functional.mse_loss)
    return {name: p.grad for name, p in pipeline.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_have_the_gradients_of_one_process(procs, scale, schedule):
    parts = procs(scale.ranks, _stage, schedule)
    assert all(parts)
    found = {name: grad for part in parts for name, grad in part.items()}
    model = _deep(scale.ranks)
    model(rows("cpu", 0, 4 * scale.ranks)).square().mean().backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    assert found.keys() == expected.keys()
    assert lost([found[name] for name in expected], list(expected.values())) < 1e-5


def _crowd(group: Group, rounds: int) -> tuple[int, float]:
    """Return wrong sums, and milliseconds of a barrier and a sum."""
    wrong = 0
    x = torch.empty(1000)
    group.barrier()
    begin = time.perf_counter()
    for number in range(rounds):
        group.barrier()
        x.fill_(group.rank + number)
        group.all_reduce(x)
        expected = group.size * (group.size - 1) / 2 + group.size * number
        wrong += not torch.equal(x, torch.full_like(x, expected))
    return wrong, 1e3 * (time.perf_counter() - begin) / rounds


def test_more_ranks_than_cores_wait_for_each_other(procs, scale, figures):
    found = procs(scale.crowd, _crowd, scale.rounds)
    cores = len(os.sched_getaffinity(0))
    figures(ranks=scale.crowd, cores=cores, barrier_and_sum_ms=round(found[0][1], 3))
    assert [wrong for wrong, _ in found] == [0] * scale.crowd
