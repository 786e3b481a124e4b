"""Claim of the launcher: whatever kills or stops a rank, the right rank is blamed and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from braid.bench.faults import run_fault_trials

pytestmark = pytest.mark.procs
JOB = Path(__file__).with_name("fault_job.py")


@pytest.mark.parametrize("trials", [4, pytest.param(50, marks=pytest.mark.proof)])
def test_the_culprit_is_right_in_every_trial(trials):
    report = run_fault_trials(trials, seed=trials, script=JOB)
    assert ([trial.found for trial in report.wrong], report.orphans) == ([], 0)
    assert report.correct == trials
