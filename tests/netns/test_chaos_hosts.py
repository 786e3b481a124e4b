"""`braid chaos` makes hosts, cuts one of them off, and the run loses no step."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import time, torch, braid
from torch.utils.data import DataLoader, TensorDataset
braid.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(96, 8)), batch_size=4)
with braid.elastic(model, optimizer) as training:
    for _ in training.epochs(100_000):
        for (x,) in training.batches(loader):
            with training.step():
                time.sleep(0.02)
                model(x).square().mean().backward()
"""


@pytest.mark.proof
def test_a_host_is_cut_off_and_a_rank_is_killed_and_no_step_is_lost(tmp_path: Path):
    job = tmp_path / "job.py"
    job.write_text(JOB)
    command = [
        sys.executable, "-m", "braid", "chaos", "--kinds", "partition,kill", "--every", "8s",
        "--minutes", "0.5", "run", "-H", "a:2,b:2", "--threads", "1", "--min-ranks", "1",
        "--log-dir", str(tmp_path / "run"), str(job),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    text = ended.stdout + ended.stderr
    assert ended.returncode == 0, text
    assert re.search(r"lost steps +0\n", text)
    assert re.search(r"causes +([2-9]) of \1 right", text)
    assert "partition" in (tmp_path / "run" / "chaos.html").read_text()
