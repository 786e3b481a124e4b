"""Horovod's elastic scripts: ranks die and come, each sample is trained once, weights stay equal."""

from __future__ import annotations

import os
import subprocess
import sys
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


def check(found: dict[int, dict], members: list[int], num_repeats: int = 0) -> None:
    """Check the results of the members at the end, of which the first one is rank 0.

    Of all that is kept, each sample comes once in an epoch, but for at most `num_repeats` at the end
    of an epoch whose samples the members could not share equally.
    """
    order = sorted(found, key=lambda number: found[number]["place"])  # newcomers as they come
    assert (order[0], set(order)) == (members[0], set(members))
    for number, result in found.items():
        assert result["place"] == (order.index(number), len(members))
        assert result["lr"] == pytest.approx(LR * len(members))
        assert result["same"], "all have the same weights"
        times = Counter((epoch, n) for epoch, *indices in result["seen"] for n in indices)
        assert len(times) == NUM_EPOCHS * NUM_SAMPLES
        assert sum(times.values()) <= len(times) + num_repeats


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
    outcome, found, notices = run_job(tmp_path, "1:5 pair", spares=1)
    assert outcome.ok, str(outcome)
    check(found, [0, 2, 3])
    assert {number: result["sizes"] for number, result in found.items()} == {0: [3], 2: [3], 3: []}
    assert any(text.startswith("epoch 1: ranks 0, 2, 3 go on") for text in notices)


def test_rank_0_dies_and_the_oldest_rank_takes_its_place(tmp_path):
    outcome, found, _ = run_job(tmp_path, "0:3 2:reset pair")
    assert outcome.ok, str(outcome)
    check(found, [1])
    assert found[1]["sizes"][-1] == 1


def horovodrun(
    tmp_path: Path, options: str, words: str, job: str = ""
) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "braid.compat.horovod.run", *options.split()]
    return subprocess.run(
        [
            *run,
            "--output-filename",
            tmp_path / "run",
            sys.executable,
            *((job,) if job else (JOB, tmp_path / "out")),
            *words.split(),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def grown(tmp_path: Path, slots: str, later: str) -> subprocess.CompletedProcess[str]:
    """Run on discovered slots: rank 1 dies in step 3, then the slots are those of `later`."""
    path = tmp_path / "slots"
    path.write_text(slots)
    options = f"-np 2 --min-np 1 --max-np 3 --host-discovery-script {discovery(tmp_path, path)}"
    ended = horovodrun(
        tmp_path, f"{options} --blacklist-cooldown-range 1 2", f"1:3 wait grow:{path}={later}"
    )
    assert ended.returncode == 0, ended.stderr
    return ended


def test_horovodrun_takes_a_rank_in_when_a_slot_has_rested_or_is_discovered(tmp_path):
    grown(tmp_path, "localhost:2\n", "localhost:3")
    found = found_in(tmp_path)
    assert len(found) == 3
    check(found, [0, *sorted(found)[1:]], num_repeats=2)


ELASTIC_JOB = """
import os, sys, time, torch, braid
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
braid.init()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=4)
with braid.elastic(model, optimizer, shards=3) as training:
    for epoch in training.epochs(4):
        for (x,) in training.batches(loader):
            with training.step():
                model(x).square().mean().backward()
        if epoch == 1:
            Path(sys.argv[1]).write_text("localhost:1")
            while braid.world().size > 1 and not training._members.pauses:
                time.sleep(0.05)  # until the launcher has seen it
print("rank", os.environ["RANK"], "ends")
"""


def test_a_rank_of_an_elastic_training_ends_with_its_slot(tmp_path):
    slots, job = tmp_path / "slots", tmp_path / "job.py"
    slots.write_text("localhost:2\n")
    job.write_text(ELASTIC_JOB)
    script = discovery(tmp_path, slots)
    options = f"-np 2 --min-np 1 --max-np 2 --host-discovery-script {script}"
    ended = horovodrun(tmp_path, options, str(slots), job=str(job))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("] ")[-1] == "rank 0 ends\n"
    assert "Error" not in ended.stderr


FAKE_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift 2; done
[ "$1" = nowhere ] && { echo cannot resolve nowhere >&2; exit 255; }
shift
exec sh -c "$*"
"""


@pytest.fixture
def _ssh(tmp_path, monkeypatch):
    """A command `ssh` that reaches hosts which are this one, but for the host nowhere."""
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "ssh").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("_ssh")
def test_horovodrun_takes_ranks_in_on_hosts_that_were_blocked_or_come_later(tmp_path):
    ended = grown(tmp_path, "a:1\nb:1\nnowhere:1\n", "a:1,b:1,c:1")
    assert "host nowhere has no agent" in ended.stderr
    for text in ("b is blocked for 1 s", "b has joined the run", "c has joined the run"):
        assert f"braid: host {text}" in ended.stderr
    found = found_in(tmp_path)
    assert len(found) == 3
    check(found, [0, *sorted(found)[1:]], num_repeats=2)


@pytest.mark.usefixtures("_ssh")
def test_too_few_hosts_at_the_start_are_an_error_that_names_the_others(tmp_path):
    ended = horovodrun(tmp_path, "-np 2 --min-np 2 -H a:1,nowhere:1", "")
    assert ended.returncode == 2
    assert "host nowhere has no agent" in ended.stderr


def discovery(tmp_path: Path, slots: Path) -> Path:
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {slots}\n")
    script.chmod(0o755)
    return script


def test_horovodrun_says_at_the_start_what_is_wrong_with_a_script(tmp_path):
    script = discovery(tmp_path, tmp_path / "missing")
    ended = horovodrun(tmp_path, f"-np 2 --host-discovery-script {script}", "")
    assert ended.returncode == 2
    assert "exited with code 1: cat: " in ended.stderr


def test_too_many_resets_end_the_run_with_the_lost_rank_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_RESET_LIMIT", "1")
    outcome, _, _ = run_job(tmp_path, "0:3 1:7")
    assert outcome.exit_code == 1
    assert (
        "rank 1 was killed by signal 9 (SIGKILL), and the run ends because the members have "
        "already changed 1 times (reset_limit=1)" in str(outcome)
    )


def test_a_death_before_the_training_function_is_the_cause(tmp_path):
    outcome, _, _ = run_job(tmp_path, "1:start")
    assert outcome.exit_code == 137
    assert [end.rank for end in outcome.cause] == [1]


def test_a_lost_rank_ends_a_run_whose_members_are_fixed(tmp_path):
    job = JobSpec(
        command=(JOB, str(tmp_path / "out"), "1:3"),
        num_ranks=3,
        log_dir=str(tmp_path / "run"),
        threads=1,
        timeout_s=150.0,
    )
    outcome = Supervisor(QuietConsole()).run(job)
    assert outcome.exit_code == 137
    assert [end.rank for end in outcome.cause] == [1]
