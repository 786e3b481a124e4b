"""A run in the directory of an earlier one loses nothing of it, and mixes nothing with it."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from braid.launch import JobSpec
from braid.launch.observe import read_run
from braid.launch.supervise.run_record import (
    git_commit,
    make_log_dir,
    package_versions,
    write_record,
)
from braid.runtime.diagnose.run_record import RunRecord


def test_files_of_an_earlier_run_are_set_aside(tmp_path):
    job = JobSpec(command=("train.py",), log_dir=str(tmp_path))
    make_log_dir(job)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    for number in (1, 2):
        (tmp_path / "run.json").write_text(f"{number}")
        (tmp_path / "rank0.log").write_text(f"log {number}")
        (tmp_path / "metrics").mkdir()
        (tmp_path / "metrics" / "rank0.jsonl").write_text(f"rows {number}")
        (tmp_path / "metrics.jsonl").write_text("of the training")
        make_log_dir(job)
        aside = tmp_path / f"earlier-{number}"
        assert (aside / "metrics" / "rank0.jsonl").read_text() == f"rows {number}"
        assert (aside / "rank0.log").read_text() == f"log {number}"
        assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("earlier")) == [
            "metrics.jsonl", "run.json",
        ]  # fmt: skip


@pytest.mark.parametrize("num_moved", range(5))
def test_setting_aside_that_is_interrupted_leaves_a_readable_run_and_is_finished_by_the_next_one(
    tmp_path, monkeypatch, num_moved
):
    job = JobSpec(command=("train.py",), log_dir=str(tmp_path))
    record = RunRecord(braid="0.1.0", command=("train.py",), num_ranks=2)
    write_record(tmp_path, record)
    for name in ("rank0.log", "rank1.log", "report.html"):
        (tmp_path / name).write_text(name)
    rename, moved = Path.rename, []

    def interrupted(path: Path, target: Path) -> Path:
        if len(moved) == num_moved:
            raise KeyboardInterrupt
        moved.append(path)
        return rename(path, target)

    aside = tmp_path / "earlier-1"
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "rename", interrupted)
        make_log_dir(job)
    if num_moved < 4:
        assert read_run(tmp_path).record == record
    make_log_dir(job)
    assert read_run(aside).record == record
    assert sorted(path.name for path in aside.iterdir()) == [
        "rank0.log", "rank1.log", "report.html", "run.json",
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier-1", "run.json"]


def test_the_commit_is_named_with_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert git_commit() == ""

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    Path("a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    assert git_commit() == commit
    Path("a").write_text("2")
    assert git_commit() == f"{commit}+changes"


def test_versions_of_what_is_installed_are_there():
    assert {"python", "torch", "numpy"} <= set(package_versions())
