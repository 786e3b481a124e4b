"""Reports of a parameter server that stands still: who waits for what, and whose answer is missing."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from braid.launch import JobSpec, QuietConsole, Supervisor

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
JOB = Path(__file__).with_name("ps_hang_job.py")
# scheduler 0, server 1, workers 2 and 3
CASES = {
    "barrier": ([r"rank 2 .*barrier#\d+  'end', asked of rank 0"], r"missing +rank 3 \(pid"),
    "pull": ([r"rank 2 .*pull#\d+  table 'w', asked of rank 1"], r"missing +rank 3 \(pid"),
    "push": ([r"rank 2 .*push#\d+  table 'w', asked of rank 1"], r"missing +rank 3 \(pid"),
    "scheduler_loops": ([r"ranks 2,3 .*barrier#\d+  'end'"], r"missing +rank 0 \(pid"),
    "scheduler_stopped": ([r"ranks 2,3 .*barrier#\d+  'end'"], r"likely +rank 0 is stopped"),
}


class Helpful(QuietConsole):
    """Does what a report advises when a rank is stopped."""

    def notice(self, text: str) -> None:
        super().notice(text)
        advice = re.search(r"-> `kill -CONT (\d+)`", text)
        if advice:
            os.kill(int(advice[1]), signal.SIGCONT)


@pytest.mark.parametrize(
    "way",
    [
        "pull",
        "scheduler_stopped",
        *(pytest.param(w, marks=pytest.mark.proof) for w in ("barrier", "push", "scheduler_loops")),
    ],
)
def test_the_node_whose_answer_is_missing_is_named(tmp_path, way):
    folder, console = tmp_path / "run", Helpful()
    job = JobSpec(
        command=(str(JOB), way, str(folder)),
        num_ranks=4,
        environ={**os.environ, "BRAID_SERVERS": "1"},
        hang_report_s=2.0,
        log_dir=str(folder),
    )
    outcome = Supervisor(console).run(job)
    assert outcome.exit_code == 0, console.notices
    report = next(text for text in console.notices if text.startswith("no progress"))
    waiting, missing = CASES[way]
    for pattern in waiting:
        assert re.search(pattern, report), report
    assert re.search(missing, report), report
