"""The program that `braid convert` writes trains a model on each of its meshes, alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from program_jobs import run_program

from braid.cli import main

MODEL = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.layers[0].weight

    def forward(self, x, gate):
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = x + torch.tanh(layer(x)) * gate
        return self.head(x) - first


def make():
    return Net(), (torch.randn(8, 6), torch.rand(8, 1))
"""


@pytest.mark.procs
def test_the_written_program_trains_alike_on_every_mesh(procs, tmp_path, monkeypatch):
    (tmp_path / "tied.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["convert", "tied:make", "--out", "net"]) == 0
    losses = {}
    for config in sorted(Path("net").glob("*.json")):
        axes = json.loads(config.read_text())["mesh"]
        program, ranks = Path("net/train.py").resolve(), axes["pp"] * axes["dp"]
        outputs = run_program(procs, ranks, program, str(config.resolve()))
        losses[config.stem] = [float(line.split()[3]) for line in outputs[0].splitlines()]
    first, *others = losses.values()
    assert len(first) == 3
    assert first[0] > first[2]
    assert all(own == pytest.approx(first, rel=1e-5) for own in others)
