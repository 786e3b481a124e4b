"""`braid run` with a device: memory, illegal accesses, kernels that do not end, and what braid knows of the machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from braid.cli import main

BEGIN = """
import os, sys, time, torch, braid
group = braid.init()
device = sys.argv[1]
x = torch.ones(4, device=device)
print("local rank", os.environ["LOCAL_RANK"], "of", group.rank, flush=True)
print("sum", group.all_reduce(x).sum().item(), flush=True)
"""
TOO_LARGE = f"""{BEGIN}
if group.rank == 1:
    torch.empty(1 << (60 if device == "cpu" else 40), dtype=torch.uint8, device=device)
group.barrier()
"""
OUT_OF_RANGE = f"""{BEGIN}
row = torch.tensor([9 if group.rank == 1 else 1], device=device)
y = torch.nn.functional.embedding(row, torch.ones(4, 2, device=device))
group.all_reduce(y)
"""
SPINNING = f"""{BEGIN}
if group.rank == 1:
    time.sleep(5) if device == "cpu" else torch.cuda._sleep(10**11)
group.all_reduce(x)
"""


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


Command = Callable[..., Ended]


@pytest.fixture
def braid(tmp_path, monkeypatch, capfd) -> Command:
    """Run a command of braid in a directory of its own; its output is shown where the test fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> Ended:
        ended = Ended(main(words), *capfd.readouterr())
        print(ended.stdout, ended.stderr, sep="\n")
        return ended

    return run


def run(braid: Command, device: str, program: str, *options: str) -> Ended:
    """Run a program on two ranks that share the device."""
    Path("train.py").write_text(program)
    ended = braid("run", "-n", "2", *options, "--log-dir", "run", "train.py", device)
    assert "sum 8.0" in ended.stdout
    assert all(f"local rank {rank} of {rank}" in ended.stdout for rank in (0, 1))
    return ended


def line_of(text: str, label: str) -> str:
    """Return the first line that begins with `label`, and lines that belong to it."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"  {label} "))
    rest = (i for i in range(first + 1, len(lines)) if not lines[i].startswith(" " * 6))
    return "\n".join(lines[first : next(rest, len(lines))])


@pytest.mark.launcher
def test_a_rank_without_memory_is_the_cause_with_the_size(braid, device):
    done = run(braid, device, TOO_LARGE)
    size = "1152921504606846976 bytes" if device == "cpu" else "1024.00 GiB"
    assert done.code == 1
    assert "rank 1" in line_of(done.stderr, "cause")
    assert size in line_of(done.stderr, "cause")


@pytest.mark.launcher
def test_a_rank_that_reads_outside_of_its_memory_is_the_cause(braid, device):
    done = run(braid, device, OUT_OF_RANGE)
    error = "IndexError: index out of range" if device == "cpu" else "device-side assert triggered"
    assert done.code != 0  # the CUDA driver may abort a process whose context is lost
    assert "rank 1" in line_of(done.stderr, "cause")
    assert error in line_of(done.stderr, "cause")
    assert re.search(r"rank 0 was .*in all_reduce", line_of(done.stderr, "affected"))


@pytest.mark.launcher
def test_a_kernel_that_does_not_end_makes_its_rank_the_missing_one(braid, device):
    done = run(braid, device, SPINNING, "--hang-report", "2", "--timeout", "25")
    reason = "is at train.py:10" if device == "cpu" else "waits for its GPU in all_reduce"
    assert done.code == (0 if device == "cpu" else 124)  # the kernel takes longer than the run may
    assert "rank 0" in line_of(done.stderr, "waiting")
    assert "rank 1" in line_of(done.stderr, "missing")
    assert f"rank 1 {reason}" in line_of(done.stderr, "likely")


@pytest.mark.launcher
def test_the_doctor_knows_the_device(braid, device):
    done = braid("doctor")
    assert bool(re.search(r"GPUs +none", done.stdout)) == (device == "cpu"), done.stdout
