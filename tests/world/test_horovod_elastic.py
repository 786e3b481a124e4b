"""Horovod's elastic scripts: ranks die and come, each sample is trained once, weights stay equal."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from braid.launch import JobSpec, QuietConsole, Supervisor
from braid.launch.process.job import ElasticLimits

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
JOB = str(Path(__file__).with_name("horovod_elastic_job.py"))
LR, NUM_EPOCHS, NUM_SAMPLES = 0.01, 3, 96


def found_in(tmp_path: Path) -> dict[int, dict]:
    return {int(path.suffix[1:]): torch.load(path) for path in tmp_path.glob("out.*")}


def check(found: dict[int, dict], members: list[int]) -> None:
    """Check the results of the members at the end, in the order of their ranks."""
    assert sorted(found, key=lambda number: found[number]["place"]) == members
    for number, result in found.items():
        assert result["place"] == (members.index(number), len(members))
        assert result["lr"] == pytest.approx(LR * len(members))
        assert result["same"], "all have the same weights"
        times = Counter((epoch, n) for epoch, *indices in result["seen"] for n in indices)
        assert len(times) == NUM_EPOCHS * NUM_SAMPLES
        assert set(times.values()) == {1}, "of what is kept, each sample comes once in an epoch"


def run_job(tmp_path: Path, words: str, **limits: int):
    console = QuietConsole()
    job = JobSpec(
        command=(JOB, str(tmp_path / "out"), *words.split()),
        num_ranks=3,
        elastic=ElasticLimits(**{"min_ranks": 1, "max_ranks": 3, "restarts": 0} | limits),
        log_dir=str(tmp_path / "run"),
        threads=1,
        timeout_s=150.0,
    )
    outcome = Supervisor(console).run(job)
    return outcome, found_in(tmp_path), console.notices


def test_a_lost_rank_brings_back_the_last_commit_and_a_newcomer_is_taken_in(tmp_path):
    outcome, found, notices = run_job(tmp_path, "1:5", spares=1)
    assert outcome.ok, str(outcome)
    check(found, [0, 2, 3])
    assert {number: result["sizes"] for number, result in found.items()} == {0: [3], 2: [3], 3: []}
    assert any(text.startswith("epoch 1: ranks 0, 2, 3 go on") for text in notices)


def test_rank_0_dies_and_the_oldest_rank_takes_its_place(tmp_path):
    outcome, found, _ = run_job(tmp_path, "0:3 2:reset")
    assert outcome.ok, str(outcome)
    check(found, [1])
    assert found[1]["sizes"][-1] == 1


def test_too_many_resets_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_RESET_LIMIT", "0")
    outcome, _, _ = run_job(tmp_path, "1:3")
    assert not outcome.ok
    assert "the members have changed 0 times, and may 0 times" in str(outcome)


def test_a_lost_rank_ends_a_run_whose_members_are_fixed(tmp_path):
    job = JobSpec(
        command=(JOB, str(tmp_path / "out"), "1:3"),
        num_ranks=3,
        log_dir=str(tmp_path / "run"),
        threads=1,
        timeout_s=90.0,
    )
    outcome = Supervisor(QuietConsole()).run(job)
    assert outcome.exit_code == 137
    assert [end.rank for end in outcome.cause] == [1]
