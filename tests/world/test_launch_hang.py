"""Claims of hang reports on real jobs: the rank that does not come is named with its line and the reason; nobody else is."""

from __future__ import annotations

import os
import re
import signal
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from braid.launch import JobSpec, Outcome, QuietConsole, Supervisor
from braid.runtime.diagnose.run_record import RunRecord

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
JOBS = Path(__file__).with_name("hang_jobs.py")
WAYS = ("holds_the_lock", "computes", "slow_loader", "all_compute", "out_of_batches", "stopped")
NUMBERS = re.compile(r"\d+\.\d+ s|pid \d+|#\d+|\.py:\d+|cpu \d+ %")


def run(*names: str, tmp_path: Path, console: QuietConsole | None = None, n: int = 2) -> Outcome:
    job = JobSpec(
        command=(str(JOBS), *names),
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


class Helpful(QuietConsole):
    """Does what a report advises when a rank is stopped."""

    def notice(self, text: str) -> None:
        super().notice(text)
        advice = re.search(r"-> `kill -CONT (\d+)`", text)
        if advice:
            os.kill(int(advice[1]), signal.SIGCONT)


class Stalled(NamedTuple):
    """A job of two ranks that stood still again and again, each time in another way."""

    outcome: Outcome
    console: QuietConsole
    folder: Path

    def block(self, name: str) -> str:
        """The only report about a way, after which the missing rank went on."""
        (block,) = blocks(self.console, name)
        texts = iter(self.console.notices)
        next(x for x in texts if x.startswith("no progress") and f"in {name}" in x)
        then = "\n".join(takewhile(lambda x: not x.startswith("no progress"), texts))
        assert re.search(r"^rank 1 went on after \d+\.\d s$", then, re.MULTILINE), then
        return block


@pytest.fixture(scope="module")
def stalled(tmp_path_factory: pytest.TempPathFactory) -> Stalled:
    folder, console = tmp_path_factory.mktemp("stalled"), Helpful()
    outcome = run(*WAYS, tmp_path=folder, console=console)
    return Stalled(outcome, console, folder)


def test_a_job_that_stood_still_goes_on_to_its_end(stalled):
    assert stalled.outcome.exit_code == 0


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
def test_the_rank_that_does_not_come_is_named_with_its_line(stalled, name, step, missing, likely):
    lines = stalled.block(name).split("\n")
    assert lines[:2] == [
        f"no progress for N s{step}",
        f"  waiting  rank 0  all_reduce#N  float32[4], sum   hang_jobs.py:N in {name}",
    ]
    assert lines[2] == f"  missing  rank 1 (pid N)   {missing}"
    assert lines[3].startswith("           last seen N s ago, as it ended ")
    assert lines[4] == f"  likely   rank 1 {likely}"
    assert lines[5].startswith("           -> ")


def test_a_rank_that_computes_is_named(stalled):
    missing, likely = (x for x in stalled.block("computes").split("\n") if "rank 1" in x)
    assert re.fullmatch(
        r"  missing  .* in re.match  hang_jobs.py:N in computes   cpu N %, running", missing
    )
    assert re.fullmatch(
        r"  likely   rank 1 computes at hang_jobs.py:N in computes [(]cpu N %[)] .*", likely
    )


def test_reports_are_kept_with_the_run(stalled):
    texts = [text for text in stalled.console.notices if text.startswith("no progress")]
    reports = tuple(f"braid: {text}" for text in texts)
    record = msgspec.json.decode((stalled.folder / "run/run.json").read_bytes(), type=RunRecord)
    assert record.hangs == reports
    assert (stalled.folder / "run/hang-1.txt").read_text() == f"{reports[0]}\n"


def test_a_stopped_rank_is_named_with_the_command_that_lets_it_go_on(stalled):
    block = stalled.block("stopped")
    assert "  missing  rank 1 (pid N)   cpu N %, stopped\n" in block
    assert "  likely   rank 1 is stopped (state T)\n" in block


def test_no_alarm_is_raised_while_all_compute(stalled):
    assert blocks(stalled.console, "all_compute") == []


def test_ranks_in_different_groups_are_told_that_they_wait_for_each_other(tmp_path):
    console = QuietConsole()
    outcome = run("another_group", tmp_path=tmp_path, console=console, n=3)
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
    run("new_groups", tmp_path=tmp_path, console=console)
    (block,) = blocks(console, "new_groups")
    assert block.split("\n")[-2:] == [
        (
            "  likely   ranks 0,1 wait for each other in different groups: "
            "rank 0 in all_reduce#N for rank 1; rank 1 in all_reduce#N for rank 0"
        ),
        "           -> let all ranks use their groups in the same order",
    ]
