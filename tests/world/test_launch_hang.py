"""WorkCounter of hang reports on real jobs: the rank that does not come is named with its line and the reason; nobody else is."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import msgspec
import pytest

from braid.diagnose import RunRecord
from braid.launch import JobSpec, Outcome, QuietConsole, Supervisor

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
JOBS = Path(__file__).with_name("hang_jobs.py")
NUMBERS = re.compile(r"\d+\.\d+ s|pid \d+|#\d+|\.py:\d+|cpu \d+ %")


def run(name: str, tmp_path: Path, console: QuietConsole | None = None, n: int = 2) -> Outcome:
    job = JobSpec(
        command=(str(JOBS), name),
        num_ranks=n,
        hang_report_s=0.5,
        log_dir=str(tmp_path / "run"),
    )
    return Supervisor(console).run(job)


def blocks(console: QuietConsole, name: str) -> list[str]:
    """Reports about the lines of a job, without what differs between runs.

    A machine with other work may hold up its first lines as well.
    """
    return [
        NUMBERS.sub(lambda m: re.sub(r"\d+\.\d+|\d+", "N", m[0]), text)
        for text in console.notices
        if text.startswith("no progress") and f"in {name}" in text
    ]


def went_on(console: QuietConsole) -> bool:
    """Whether the last word was that the missing rank goes on."""
    return re.fullmatch(r"rank 1 went on after \d+\.\d s", console.notices[-1]) is not None


@pytest.mark.parametrize(
    ("name", "step", "missing", "likely"),
    [
        (
            "out_of_batches",
            " at step 4",
            "at hang_jobs.py:N in write_results   cpu N %, sleeping",
            "has run out of batches: its last step was 3, rank 0 is in step 4",
        ),
        (
            "holds_the_lock",
            "",
            "at hang_jobs.py:N in holds_the_lock   cpu N %, sleeping",
            "is at hang_jobs.py:N in holds_the_lock: in a call that has not returned (it may hold the interpreter's lock)",
        ),
        (
            "slow_loader",
            "",
            "in DataLoader.__next__  hang_jobs.py:N in __getitem__   cpu N %, sleeping",
            "waits for its data",
        ),
    ],
)
def test_the_rank_that_does_not_come_is_named_with_its_line(tmp_path, name, step, missing, likely):
    console = QuietConsole()
    outcome = run(name, tmp_path, console)
    (block,) = blocks(console, name)
    lines = block.split("\n")
    assert (outcome.exit_code, went_on(console)) == (0, True)
    assert lines[:2] == [
        f"no progress for N s{step}",
        f"  waiting  rank 0  all_reduce#N  float32[4], sum   hang_jobs.py:N in {name}",
    ]
    assert lines[2] == f"  missing  rank 1 (pid N)   {missing}"
    assert lines[3].startswith("           last seen N s ago, as it ended ")
    assert lines[4] == f"  likely   rank 1 {likely}"
    assert lines[5].startswith("           -> ")


def test_a_rank_that_computes_is_named_and_the_report_is_kept_with_the_run(tmp_path):
    console = QuietConsole()
    run("computes", tmp_path, console)
    (block,) = blocks(console, "computes")
    missing, likely = (line for line in block.split("\n") if "rank 1" in line)
    assert re.fullmatch(
        r"  missing  .* in re.match  hang_jobs.py:N in computes   cpu N %, running", missing
    )
    assert re.fullmatch(
        r"  likely   rank 1 computes at hang_jobs.py:N in computes [(]cpu N %[)] .*", likely
    )
    reports = tuple(f"braid: {text}" for text in console.notices if text.startswith("no progress"))
    record = msgspec.json.decode((tmp_path / "run/run.json").read_bytes(), type=RunRecord)
    assert record.hangs == reports
    assert (tmp_path / "run/hang-1.txt").read_text() == f"{reports[0]}\n"


def test_a_stopped_rank_is_named_with_the_command_that_lets_it_go_on(tmp_path):
    class Helpful(QuietConsole):
        def notice(self, text: str) -> None:
            super().notice(text)
            advice = re.search(r"-> `kill -CONT (\d+)`", text)
            if advice:
                os.kill(int(advice[1]), signal.SIGCONT)

    console = Helpful()
    outcome = run("stopped", tmp_path, console)
    (block,) = blocks(console, "stopped")
    assert (outcome.exit_code, went_on(console)) == (0, True)
    assert "  missing  rank 1 (pid N)   cpu N %, stopped\n" in block
    assert "  likely   rank 1 is stopped (state T)\n" in block


def test_ranks_in_different_groups_are_told_that_they_wait_for_each_other(tmp_path):
    console = QuietConsole()
    outcome = run("another_group", tmp_path, console, n=3)
    (block,) = blocks(console, "another_group")
    where = "all_reduce#N  float32[4], sum   hang_jobs.py:N in another_group   group of ranks"
    first, *lines = block.split("\n")
    assert (outcome.ok, first) == (False, "no progress for N s")
    assert lines == [
        f"  waiting  ranks 0,2  {where} 0,1,2",
        f"           rank 1  {where} 0,1",
        (
            "  likely   ranks 0,1 wait for each other in different groups: "
            "rank 0 in all_reduce#N for rank 1; rank 1 in all_reduce#N for rank 0"
        ),
        "           -> let all ranks use their groups in the same order",
    ]


def test_ranks_that_use_new_groups_in_another_order_are_told_so(tmp_path):
    console = QuietConsole()
    run("new_groups", tmp_path, console)
    (block,) = blocks(console, "new_groups")
    assert block.split("\n")[-2:] == [
        (
            "  likely   ranks 0,1 wait for each other in different groups: "
            "rank 0 in all_reduce#N for rank 1; rank 1 in all_reduce#N for rank 0"
        ),
        "           -> let all ranks use their groups in the same order",
    ]


def test_no_alarm_is_raised_while_all_compute(tmp_path):
    console = QuietConsole()
    outcome = run("all_compute", tmp_path, console)
    assert (outcome.exit_code, blocks(console, "all_compute")) == (0, [])
