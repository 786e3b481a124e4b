"""`braid run --min-ranks`: processes that are killed cost no step and no bit."""

from __future__ import annotations

import os
import re
import signal
from contextlib import closing
from pathlib import Path

import pytest

from braid.launch import JobSpec, QuietConsole, Supervisor
from braid.launch.process.job import ElasticLimits
from braid.launch.supervise import member_driver

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
JOB = str(Path(__file__).with_name("elastic_job.py"))
MESH_JOB = str(Path(__file__).with_name("elastic_mesh_job.py"))


class WakingConsole(QuietConsole):
    """Console that wakes a rank which the launcher names."""

    def notice(self, text: str) -> None:
        super().notice(text)
        if "is not ready for the next epoch" in text:
            os.kill(int(re.search(r"pid (\d+)", text)[1]), signal.SIGUSR2)


def _run(
    tmp_path: Path,
    arguments: str,
    num_ranks: int = 3,
    program: str = JOB,
    console: QuietConsole | None = None,
    **limits: int,
):
    console = console or WakingConsole()
    values = {"min_ranks": 1, "max_ranks": num_ranks} | limits
    job = JobSpec(
        command=(program, *arguments.split()),
        num_ranks=num_ranks,
        elastic=ElasticLimits(**values),
        log_dir=str(tmp_path / "run"),
        threads=1,
        timeout_s=90.0,
        hang_report_s=1.0,
    )
    outcome = Supervisor(console).run(job)
    ends = {rank: text.decode() for rank, stream, text in console.lines if stream == 1}
    return outcome, ends, console.notices


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> str:
    outcome, ends, _ = _run(tmp_path_factory.mktemp("alone"), "", 1)
    assert outcome.ok, str(outcome)
    assert ends[0].startswith("16 ")
    return ends[0]


@pytest.mark.parametrize(
    ("deaths", "limits", "lost"),
    [
        ("1:3", {"restarts": 0}, {1}),
        pytest.param("0:2:update", {"restarts": 0}, {0}, marks=pytest.mark.proof),
        pytest.param("0:4 2:4", {"restarts": 0}, {0, 2}, marks=pytest.mark.proof),
        ("1:2 3:5", {"spares": 1, "restarts": 0}, {1, 3}),
        ("2:0", {"min_ranks": 3}, {2}),
        pytest.param("1:15:update", {"restarts": 0}, {1}, marks=pytest.mark.proof),
    ],
)
def test_killed_ranks_cost_no_step_and_no_bit(tmp_path, undisturbed, deaths, limits, lost):
    outcome, ends, notices = _run(tmp_path, deaths, **limits)
    assert outcome.ok, str(outcome)
    assert {end.rank for end in outcome.verdict.survived} == lost
    assert set(ends.values()) == {undisturbed}
    for rank in lost:
        assert any(f"rank {rank} (pid " in text and "without it" in text for text in notices)
    assert any(text.startswith("epoch 1: ranks ") for text in notices)


class ResumingConsole(WakingConsole):
    """Console that writes a byte to a FIFO when the launcher prints `text` about rank 2."""

    def __init__(self, text: str, fifo: Path) -> None:
        super().__init__()
        os.mkfifo(fifo)
        self._text = text
        self._fifo = fifo.open("r+b", buffering=0)  # does not wait for a reader

    def close(self) -> None:
        """Close the FIFO."""
        self._fifo.close()

    def notice(self, text: str) -> None:
        super().notice(text)
        if self._text in text and text.startswith("rank 2 "):
            self._fifo.write(b"1")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to take a rank off all networks")
@pytest.mark.parametrize(
    ("limit_s", "named"),
    [
        (600, "is not ready to train 1 s after its start"),
        pytest.param(
            1, "raised RendezvousError: no braid process answered at", marks=pytest.mark.proof
        ),
    ],
    ids=["tries", "fails"],
)
def test_a_spare_that_cannot_reach_its_launcher_is_named_and_costs_nothing(
    tmp_path, undisturbed, limit_s, named, monkeypatch
):
    monkeypatch.setattr(member_driver, "JOIN_NOTICE_NS", 1_000_000_000)
    faults = f"2:cut:{limit_s} 0:3:read:{tmp_path / 'fifo'} 1:5"
    with closing(ResumingConsole(named, tmp_path / "fifo")) as console:
        outcome, ends, notices = _run(tmp_path, faults, 2, console=console, spares=1, restarts=0)
    assert outcome.ok, f"{notices}: {outcome}"
    assert ends == {0: undisturbed}


@pytest.fixture(scope="module")
def undisturbed_mesh(tmp_path_factory) -> str:
    outcome, ends, _ = _run(tmp_path_factory.mktemp("alone"), "dp=1 0", 1, MESH_JOB)
    assert outcome.ok, str(outcome)
    return ends[0]


@pytest.mark.parametrize(
    ("arguments", "num_ranks", "limits"),
    [
        ("pp=2,dp=2 0 3:3", 4, {"restarts": 0}),
        pytest.param("dp=3 3 1:2", 3, {"spares": 1, "restarts": 0}, marks=pytest.mark.proof),
        pytest.param("pp=3 0 2:5", 3, {}, marks=pytest.mark.proof),
    ],
)
def test_a_mesh_loses_a_rank_and_no_bit(tmp_path, undisturbed_mesh, arguments, num_ranks, limits):
    outcome, ends, _ = _run(tmp_path, arguments, num_ranks, MESH_JOB, **limits)
    assert outcome.ok, str(outcome)
    assert len(outcome.verdict.survived) == 1
    assert set(ends.values()) == {undisturbed_mesh}


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.proof)])
def test_a_rank_that_is_told_to_end_leaves_after_its_step(tmp_path, undisturbed, victim):
    outcome, ends, notices = _run(tmp_path, f"{victim}:5:notice")
    assert outcome.ok, str(outcome)
    assert outcome.verdict.survived == ()
    assert victim not in ends
    assert set(ends.values()) == {undisturbed}
    assert any("was asked to end, and leaves the run" in text for text in notices)
    assert any(text.startswith("epoch 1: ranks ") and "at step 6" in text for text in notices)


def test_a_run_whose_members_were_all_told_to_end_is_interrupted(tmp_path):
    outcome, ends, _ = _run(tmp_path, "0:5:notice 1:5:notice 2:5:notice")
    assert outcome.exit_code == 143, str(outcome)
    assert not ends


def test_a_member_for_which_others_wait_is_named(tmp_path, undisturbed):
    outcome, ends, notices = _run(tmp_path, "1:5 2:5:wait", restarts=0)
    assert outcome.ok, str(outcome)
    assert set(ends.values()) == {undisturbed}
    named = [text for text in notices if "is not ready for the next epoch after 1 s" in text]
    assert named
    assert all(text.startswith("rank 2 (pid ") for text in named)


def test_an_exception_ends_the_run_and_is_its_cause(tmp_path):
    outcome, ends, notices = _run(tmp_path, "1:3:error")
    assert outcome.exit_code == 1
    assert [end.rank for end in outcome.cause] == [1]
    assert "ValueError: shard 7 is missing" in str(outcome)
    assert not ends
    assert not any(text.startswith("epoch 1") for text in notices)


@pytest.mark.all
@pytest.mark.parametrize(("num_ranks", "deaths"), [(3, "0:9 1:9 2:9"), (1, "0:9")])
def test_new_ranks_begin_with_the_checkpoint_if_all_members_are_lost(
    tmp_path, undisturbed, monkeypatch, num_ranks, deaths
):
    monkeypatch.setenv("SAVES", str(tmp_path / "saves"))
    monkeypatch.setenv("SAVES_EVERY", "4")
    outcome, ends, notices = _run(tmp_path, deaths, num_ranks, restarts=num_ranks)
    assert outcome.ok, str(outcome)
    assert ends == dict.fromkeys(range(num_ranks, 2 * num_ranks), undisturbed)
    (begun,) = [text for text in notices if text.startswith("epoch 1")]
    assert begun.endswith("go on at step 8, with the last checkpoint")


def test_a_run_ends_when_too_few_are_left(tmp_path):
    outcome, _, _ = _run(tmp_path, "1:3", min_ranks=3, restarts=0)
    assert outcome.exit_code == 137
    assert [end.rank for end in outcome.cause] == [1]
