"""Claim of the launcher: whatever kills or stops a rank, the right rank is blamed and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import run_fault_trials, shared_memory

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
HERE = Path(__file__).parent
PLAIN_JOB = HERE / "fault_job.py"  # barriers through the launcher's store, without torch: quick
REAL_JOB = HERE / "comm_fault_job.py"  # data parallel training


def _all_right(trials: int, seed: int, script: Path) -> None:
    report = run_fault_trials(trials, seed=seed, script=script)
    assert [trial.verdict for trial in report.wrong] == []
    assert report.left_behind == {"processes": 0, "ports": 0, "shared memory": 0}
    assert report.correct == trials


def test_the_culprit_is_right():
    _all_right(4, 4, PLAIN_JOB)


def test_the_culprit_is_right_in_real_training():
    _all_right(1, 2, REAL_JOB)


@pytest.mark.proof
@pytest.mark.parametrize("job", [PLAIN_JOB, REAL_JOB], ids=["plain", "training"])
@pytest.mark.parametrize("seed", range(100, 105))
def test_the_culprit_is_right_in_every_trial(job, seed):
    _all_right(10, seed, job)


HOLDER = """
import mmap, os, sys
fd = os.memfd_create("braid-arena-7")
os.ftruncate(fd, 4096)
memory = mmap.mmap(fd, 4096)
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("launcher", "seen"), [(os.getpid(), 1), (1, 0)], ids=["own", "other"])
def test_only_memory_of_these_runs_counts_as_left_behind(launcher, seen):
    before = shared_memory()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "BRAID_LAUNCHER_PID": str(launcher)},
    )
    with holder:
        assert holder.stdout.readline() == b"here\n"
        assert len(shared_memory() - before) == seen
        holder.stdin.close()
