"""Claim of the launcher: whatever kills or stops a rank, the right rank is blamed and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from braid.bench.faults import run_fault_trials

pytestmark = pytest.mark.procs
HERE = Path(__file__).parent
PLAIN_JOB = HERE / "fault_job.py"  # barriers through the launcher's store, without torch: quick
REAL_JOB = HERE / "comm_fault_job.py"  # data parallel training


def _all_right(trials: int, seed: int, script: Path) -> None:
    report = run_fault_trials(trials, seed=seed, script=script)
    assert [trial.found for trial in report.wrong] == []
    assert report.left_behind == {"processes": 0, "ports": 0, "shared memory": 0}
    assert report.correct == trials


def test_the_culprit_is_right():
    _all_right(4, 4, PLAIN_JOB)


def test_the_culprit_is_right_in_real_training():
    _all_right(2, 2, REAL_JOB)


@pytest.mark.proof
@pytest.mark.parametrize("job", [PLAIN_JOB, REAL_JOB], ids=["plain", "training"])
@pytest.mark.parametrize("seed", range(100, 105))
def test_the_culprit_is_right_in_every_trial(job, seed):
    _all_right(10, seed, job)
