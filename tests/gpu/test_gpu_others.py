"""Tensors of a device through Horovod's front, a parameter server and checkpoints."""

from __future__ import annotations

import time
from functools import partial

import torch
from gpu_models import STEPS, language_model, lost, mlp, rows, trained_alone

import braid.compat.horovod.torch as hvd
from braid import ps
from braid.checkpoint import BackgroundSaver, ReplicatedSnapshot, load
from braid.comm import Group
from braid.compat.horovod import session
from braid.compat.horovod.environment import HorovodEnvironment


def _horovod(group: Group, device: str) -> list[torch.Tensor]:
    session.start(group, HorovodEnvironment.of({}))
    model = mlp(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(rows(device, 10 * step + group.rank)).square().mean().backward()
        optimizer.step()
    hvd.shutdown()
    return [param.detach().cpu() for param in model.parameters()]


def test_horovod_trains_like_one_process(procs, device):
    expected = trained_alone(device, partial(torch.optim.SGD, lr=0.1))
    for found in procs(2, _horovod, device):
        assert lost(found, expected) < 1e-5


def _server(group: Group, device: str) -> torch.Tensor | None:
    with ps.join(group, 1) as node:
        table = node.dense("w", torch.ones(4, 3), partial(torch.optim.SGD, lr=0.5))
        if not node.is_worker:
            node.serve()
            return None
        for _ in range(STEPS):
            weight = table.pull().to(device)
            table.wait(table.push(weight * 0.5))
        return table.pull().cpu().clone()


def test_a_parameter_server_takes_gradients_of_the_device(procs, device):
    expected = torch.full((4, 3), 0.75**STEPS)
    found = procs(4, _server, device)
    for own in found[2:]:
        assert torch.allclose(own, expected)


def _saves(group: Group, device: str, folder: str) -> tuple[list[float], bool]:
    """Save twice; return for how many milliseconds each stopped the program, and compare."""
    model = language_model(device)
    z = torch.full((1 << 10,), 1 + 2j, device=device)
    model.register_buffer("negated", z.conj().imag)
    before = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    stood_ms = []
    with BackgroundSaver(group) as saver:
        for step in (1, 2):
            begin = time.perf_counter()
            saver.save(folder, ReplicatedSnapshot(dict(model.state_dict())), step=step)
            stood_ms.append(1e3 * (time.perf_counter() - begin))
            with torch.no_grad():
                for value in model.state_dict().values():
                    value.add_(1)
            saver.wait()
    loaded = load(folder, group=group)
    is_same = all(torch.equal(loaded.read(name), x + 1) for name, x in before.items())
    return stood_ms, is_same


def test_a_step_stands_still_for_the_copy_only(procs, device, figures, tmp_path):
    (first_ms, second_ms), is_same = procs(1, _saves, device, str(tmp_path))[0]
    figures(first_ms=round(first_ms, 2), second_ms=round(second_ms, 2))
    assert is_same
