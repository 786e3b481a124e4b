"""`braid chaos` on real processes: faults are named, no step is lost, and one page tells of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from braid.launch.observe.live_run import LiveRun

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
JOB = """
import time, torch, braid
from torch.utils.data import DataLoader, TensorDataset
braid.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(96, 8)), batch_size=4)
with braid.elastic(model, optimizer, shards=3, verify=1) as training:
    for _ in training.epochs(100_000):
        for (x,) in training.batches(loader):
            with training.step():
                time.sleep(0.02)
                model(x).square().mean().backward()
"""
MESH_JOB = """
import time, torch, braid
from torch.utils.data import DataLoader, TensorDataset
braid.init()
def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.linspace(-1, 1, 768).view(96, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
with braid.elastic_mesh(build, "dp=3", shard=2, verify=1) as training:
    for _ in training.epochs(100_000):
        for x, y in training.batches(loader):
            with training.step():
                time.sleep(0.02)
                training.model.step(x, y, loss=torch.nn.functional.mse_loss)
"""


def chaos(tmp_path: Path, program: str, options: str, min_ranks: int = 1) -> tuple[int, str]:
    """Strike a program on three ranks; returns the exit code and the output."""
    job = tmp_path / "job.py"
    job.write_text(program)
    words = [*options.split(), "run", "-n", "3", "--min-ranks", str(min_ranks), "--timeout", "100"]
    command = [sys.executable, "-m", "braid", "chaos", *words, "--log-dir", str(tmp_path / "run")]
    ended = subprocess.run(
        [*command, str(job)], capture_output=True, text=True, timeout=120, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_faults_are_named_and_cost_no_step(tmp_path: Path):
    options = "--every 1.5 --minutes 0.12 --seed 5 --kinds kill,stop,bitflip"
    code, text = chaos(tmp_path, JOB, options)
    run = tmp_path / "run"
    assert code == 0, text
    assert re.search(r"lost steps +0\n", text)
    assert re.search(r"weights +bit by bit as in the undisturbed run", text)
    assert re.search(r"causes +([1-9]\d*) of \1 right", text)
    page = (run / "chaos.html").read_text()
    assert "passed" in page
    assert "was killed by signal 9 (SIGKILL)" in page
    live = LiveRun(run)
    assert not live.is_live
    assert all(live.rows[rank] for rank in range(3))


def test_flipped_bits_are_found_on_a_mesh(tmp_path: Path):
    options = "--every 2 --minutes 0.07 --kinds bitflip"
    code, text = chaos(tmp_path, MESH_JOB, options, min_ranks=3)
    assert code == 0, text
    assert re.search(r"lost steps +0\n", text)
    assert re.search(r"causes +([1-9]\d*) of \1 right", text)
    assert "has computed other gradients than its peers in step" in text


@pytest.mark.proof
def test_state_that_a_newcomer_lacks_makes_other_weights(tmp_path: Path):
    counts = "                count += 1\n                (model(x).square().mean() * count)"
    program = (
        JOB.replace(", verify=1", "")
        .replace("with braid", "count = 1.0\nwith braid")
        .replace("                model(x).square().mean()", counts)
        .replace("lr=0.01", "lr=1e-6")
    )
    code, text = chaos(tmp_path, program, "--every 1 --minutes 0.05 --kinds kill")
    assert code == 1, text
    assert "the weights are not as in the undisturbed run" in text
    assert re.search(r"lost steps +0\n", text)


def test_a_run_that_fails_does_not_pass(tmp_path: Path):
    program = (
        "import braid\nbraid.init()\nbraid.log(loss=1)\nraise ValueError('shard 7 is missing')\n"
    )
    code, text = chaos(tmp_path, program, "--minutes 0.1")
    assert code == 1, text
    assert "the run has failed with exit code 1" in text
    assert re.search(r"goodput +none, as the run has failed\n", text)
    assert re.search(r"causes +0 of [123] right\n", text)  # the failure, after the last step
    assert "shard 7 is missing" in (tmp_path / "run" / "chaos.html").read_text()
