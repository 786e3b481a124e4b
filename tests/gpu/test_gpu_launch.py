"""`braid run` with a device: its number, an allocation that is too large, and what braid knows of the machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOO_LARGE = """
import os, sys, torch, braid
group = braid.init()
device = sys.argv[1]
x = torch.ones(4, device=device if device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.device_count() > 1 else "cuda:0")
print("sum", group.all_reduce(x).sum().item(), flush=True)
if group.rank == 1:
    torch.empty(1 << 60, dtype=torch.uint8, device=device)
group.barrier()
"""


def braid(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "braid", *words]
    environ = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path, env=environ
    )


@pytest.mark.launcher
def test_a_rank_without_memory_is_the_cause_with_the_size(tmp_path, device):
    script = tmp_path / "train.py"
    script.write_text(TOO_LARGE)
    done = braid(tmp_path, "run", "-n", "2", "--log-dir", "run", str(script), device)
    assert done.returncode == 1, done.stderr
    assert "sum 8.0" in done.stdout
    cause = next(line for line in done.stderr.splitlines() if "cause" in line)
    assert "rank 1" in cause
    assert any(words in done.stderr for words in ("1152921504606846976 bytes", "EiB", "GiB"))


@pytest.mark.launcher
def test_the_doctor_knows_the_device(tmp_path, device):
    done = braid(tmp_path, "doctor")
    assert bool(re.search(r"GPUs +none", done.stdout)) == (device == "cpu"), done.stdout
