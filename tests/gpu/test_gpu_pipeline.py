"""Pipelines on a device: stages of one process, of ranks that share it, and torchgpipe's face."""

from __future__ import annotations

import pytest
import torch
from gpu_models import lost, mlp, rows
from timing import interleaved_ms
from torch import nn

from braid import Pipeline
from braid.comm import Group
from braid.compat.torchgpipe import GPipe
from braid.parallel.pipeline import DevicePipeline


def _devices(device: str) -> list[list[str]]:
    return [["cpu", "cpu"]] if device == "cpu" else [["cuda:0", "cuda:0"], ["cpu", "cuda:0"]]


def _expected(device: str) -> list[torch.Tensor]:
    model = mlp(device)
    model(rows(device, 0, 8)).square().mean().backward()
    return [param.grad for param in model.parameters()]


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_stages_of_one_process_have_its_gradients(device, recompute):
    for devices in _devices(device):
        model = DevicePipeline(
            mlp("cpu"), devices, balance=[2, 3], num_microbatches=4, recompute=recompute
        )
        model(rows("cpu", 0, 8)).square().mean().backward()
        assert lost([param.grad for param in model.parameters()], _expected("cpu")) < 1e-5


def test_recomputed_stages_draw_the_same_numbers(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    found = []
    for recompute in ("never", "always"):
        torch.manual_seed(3)
        model = DevicePipeline(
            net, [device] * 2, balance=[2, 2], num_microbatches=4, recompute=recompute
        )
        model.zero_grad()
        model(rows(device, 0, 8)).square().mean().backward()
        found.append([param.grad.clone() for param in model.parameters()])
    assert lost(*found) == 0.0


def test_torchgpipe_runs_on_it(device):
    model = GPipe(mlp("cpu"), [2, 3], devices=[device] * 2, chunks=4)
    model(rows(device, 0, 8)).square().mean().backward()
    assert lost([param.grad for param in model.parameters()], _expected("cpu")) < 1e-5


@torch.no_grad()
def test_copies_to_a_stage_hide_behind_its_work(device, figures):
    """`hidden`: part of the copies, or of the work if that is shorter, which costs no time together."""
    (width, num_rows), count = {"cpu": (64, 64), "cuda": (4096, 32768)}[device], 8
    torch.manual_seed(0)
    work = nn.Sequential(*(nn.Linear(width, width) for _ in range(2)))
    model = DevicePipeline(
        nn.Sequential(nn.Identity(), *work), ["cpu", device], balance=[1, 2], num_microbatches=count
    )
    x = torch.randn(num_rows, width)
    there = [part.to(device) for part in x.chunk(count)]
    ms = interleaved_ms(
        {
            "together": lambda: model(x),
            "copies": lambda: [part.to(device) for part in x.chunk(count)],
            "work": lambda: [work(part) for part in there],
        },
        device,
        rounds=5,
    )
    hidden = (ms["copies"] + ms["work"] - ms["together"]) / min(ms["copies"], ms["work"])
    figures(**{f"{name}_ms": round(value, 3) for name, value in ms.items()}, hidden=hidden)
    assert lost([model(x)], [torch.cat([work(part) for part in there])]) < 1e-5


def _stages(group: Group, device: str, schedule: str) -> dict[str, torch.Tensor]:
    model = mlp(device)
    pipeline = Pipeline(model, num_microbatches=4, schedule=schedule, group=group)
    x = rows(device, 0, 8)
    pipeline.step(x, torch.zeros(8, 4, device=device), loss=nn.functional.mse_loss)
    return {name: p.grad.cpu() for name, p in pipeline.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_ranks_that_share_it_have_the_gradients_of_one_process(procs, device, schedule):
    parts = procs(2, _stages, device, schedule)
    found = parts[0] | parts[1]
    model = mlp(device)
    model(rows(device, 0, 8)).square().mean().backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    assert found.keys() == expected.keys()
    assert lost([found[name] for name in expected], list(expected.values())) < 1e-5
