"""Saves behind the training: what was there when they began, safe as any, failures on all ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import said_by

import braid
from braid.checkpoint import BackgroundSaver, ReplicatedSnapshot, load, ls, saving
from braid.comm import Group
from braid.errors import CheckpointError


def _saves(group: Group, directory: str) -> Any:
    weight = torch.arange(12.0).view(4, 3)
    state = {"steps": [1, 2]}
    with BackgroundSaver(group) as saver:
        first = saver.save(
            directory,
            ReplicatedSnapshot({"model/w": weight}, rank=group.rank, size=group.size),
            step=1,
            state=state,
            keep=2,
        )
        weight.add_(100)  # the training goes on, with collectives of its own
        state["steps"].append(3)
        sums = [group.all_reduce(torch.ones(3)).sum().item() for _ in range(20)]
        path = first.wait()
        for step in (2, 3):
            saver.save(
                directory,
                ReplicatedSnapshot({"model/w": weight + step}, rank=group.rank, size=group.size),
                step=step,
                keep=2,
            )
        last = saver.wait()
        assert saver.wait() is None
    now = load(directory, group=group)
    return sums, path, last, now.read("model/w"), first.done(), first.write_s > 0


@pytest.mark.parametrize("size", [1, 3])
def test_a_save_has_the_values_of_its_step(world, tmp_path, size):
    for sums, first, last, now, done, took in world(size, _saves, str(tmp_path)):
        assert sums == [3.0 * size] * 20
        assert first == tmp_path / "step-00000001"
        assert last == tmp_path / "step-00000003"
        assert torch.equal(now, torch.arange(12.0).view(4, 3) + 103)
        assert done
        assert took
    assert [line.step for line in ls(tmp_path)] == [2, 3]
    assert not [thread for thread in threading.enumerate() if thread.name == "braid-checkpoint"]


def _values(group: Group, directory: str) -> Any:
    weight, state = torch.arange(6.0), {"steps": [1]}
    with BackgroundSaver(group) as saver:
        saver.save(directory, ReplicatedSnapshot({"model/w": weight}), step=1, state=state)
        weight.fill_(-1)
        state["steps"].append(2)
    loaded = load(directory, group=group)
    return loaded.read("model/w"), loaded.manifest.state


def test_values_may_change_as_soon_as_a_save_has_begun(world, tmp_path):
    ((weight, state),) = world(1, _values, str(tmp_path))
    assert torch.equal(weight, torch.arange(6.0))
    assert state == {"steps": [1]}


def _fails(group: Group, directory: str) -> list[str]:
    def snapshot(value: float) -> ReplicatedSnapshot:
        tensors = {"model/w": torch.full((4,), value)}
        return ReplicatedSnapshot(tensors, rank=group.rank, size=group.size)

    saver = BackgroundSaver(group)
    saver.save(directory, snapshot(1.0), step=1)
    saver.wait()
    saver.save(directory, snapshot(2.0), step=2)
    said = [said_by(lambda: saver.save(directory, snapshot(3.0), step=3), CheckpointError)]
    saver.save(directory, snapshot(4.0), step=4)
    saver.close()
    return said


def test_a_failure_is_raised_on_all_ranks_by_the_next_save(world, tmp_path, monkeypatch):
    write = saving.write_tensor_file

    def fails(path: Path, tensors: Any, *rest: Any) -> Any:
        if "step-00000002" in str(path) and path.name == "rank-00001.safetensors":
            raise OSError(28, "No space left on device")
        return write(path, tensors, *rest)

    monkeypatch.setattr(saving, "write_tensor_file", fails)
    first, second = world(2, _fails, str(tmp_path))
    assert first == second
    assert "rank 1: No space left on device while writing rank-00001.safetensors" in first[0]
    assert "Earlier checkpoints are untouched" in first[0]
    assert [line.step for line in ls(tmp_path)] == [1, 4]


def _loop(group: Group, directory: str) -> tuple[Path, int, torch.Tensor]:
    model = nn.utils.skip_init(nn.Linear, 3, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(group.size)
    with BackgroundSaver(group) as saver:
        path = braid.save(directory, model=model, step=7, group=group, saver=saver)
    with torch.no_grad():
        model.weight.zero_()
    start = braid.load(directory, model=model, group=group)
    return path, start, model.weight.detach()


def test_one_line_saves_behind_the_training(world, tmp_path):
    for path, start, weight in world(2, _loop, str(tmp_path)):
        assert path == tmp_path / "step-00000007"
        assert start == 8
        assert torch.equal(weight, torch.full((2, 3), 2.0))
