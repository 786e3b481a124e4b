"""DistributedDataParallel on a device: cost of the wrapper, graphs, scaling, streams, mixed backends."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_models import STEPS, language_model, loss_of, lost, mlp, rows, tokens, trained_alone
from timing import interleaved_ms
from torch import nn

from braid.comm import Group
from braid.parallel.data_parallel import DistributedDataParallel


def _overhead(group: Group, device: str, path: str) -> dict[str, float]:
    """Milliseconds of a step of one rank: without a wrapper, with torch's, with braid's."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=0, world_size=1)
    plain, of_torch = language_model(device), language_model(device)
    models: dict[str, nn.Module] = {
        "none": plain,
        "torch": nn.parallel.DistributedDataParallel(of_torch),
        "braid": DistributedDataParallel(language_model(device), process_group=group),
    }
    x = tokens(device, 0, 32 if device == "cuda" else 4)  # a GPU is busy for longer than a host

    def step_of(model: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model, x, torch.bfloat16).backward()
            optimizer.step()

        return step

    calls = {name: step_of(model) for name, model in models.items()}
    times = interleaved_ms(calls, device, rounds=20 if device == "cuda" else 3)
    dist.destroy_process_group()
    return times


def test_a_step_of_one_rank_with_each_wrapper(procs, device, figures, tmp_path):
    times = procs(1, _overhead, device, str(tmp_path / "store"))[0]
    figures(
        **{f"{name}_ms": round(taken, 3) for name, taken in times.items()},
        over_none_percent=round(100 * (times["braid"] / times["none"] - 1), 2),
    )
    assert set(times) == {"none", "torch", "braid"}


def _trains(group: Group, device: str, options: dict[str, Any], kind: str) -> list[torch.Tensor]:
    model = mlp(device)
    wrapped = DistributedDataParallel(model, process_group=group, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, enabled=kind == "scaler")
    stream = torch.cuda.Stream() if kind == "stream" and device == "cuda" else None
    for step in range(STEPS):
        optimizer.zero_grad()
        x = rows(device, 10 * step + group.rank)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            scaler.scale(wrapped(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
    return [param.detach().cpu() for param in model.parameters()]


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, "plain"), ({"static_graph": True}, "static"), ({}, "scaler"), ({}, "stream")],
    ids=["plain", "static_graph", "scaler", "side_stream"],
)
def test_two_ranks_on_one_device_train_like_one_process(procs, device, options, kind):
    expected = trained_alone(device, partial(torch.optim.SGD, lr=0.1))
    for found in procs(2, _trains, device, options, kind):
        assert lost(found, expected) < 1e-5


def _replays(group: Group, path: str) -> float:
    """Capture a step of the wrapped model as a CUDA graph, replay it, and compare the gradients."""
    model = mlp("cuda")
    wrapped = DistributedDataParallel(model, process_group=group)
    x = rows("cuda", 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(12):
            wrapped(x).square().mean().backward()
            model.zero_grad(set_to_none=False)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapped(x).square().mean().backward()
    model.zero_grad(set_to_none=False)
    x.copy_(rows("cuda", 1))
    graph.replay()
    found = [param.grad.clone() for param in model.parameters()]
    own = mlp("cuda")
    own(rows("cuda", 1)).square().mean().backward()
    return lost(found, [param.grad for param in own.parameters()])


def test_a_step_is_captured_as_a_graph_and_replayed(procs, device, tmp_path):
    if device == "cpu":
        pytest.skip("CUDA graphs are of GPUs")
    assert procs(1, _replays, str(tmp_path / "store"))[0] < 1e-5


def _mixed(group: Group, device: str, path: str) -> list[float]:
    """One default group for both kinds of tensors, as torch's programs make it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend = "cpu:braid,cuda:nccl" if device == "cuda" else "cpu:braid"
        dist.init_process_group(
            backend, init_method=f"file://{path}", rank=group.rank, world_size=group.size
        )
        x, y = torch.ones(3), torch.ones(3, device=device)
        dist.all_reduce(x)
        dist.all_reduce(y)
        dist.destroy_process_group()
    return [float(x.sum()), float(y.sum())]


def test_a_group_of_torch_takes_tensors_of_both_kinds(procs, device):
    size = 1 if device == "cuda" else 2  # NCCL wants a GPU for each rank
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        assert procs(size, _mixed, device, path) == [[3.0 * size] * 2] * size
