"""A placed model over three processes, one of which is killed in a step and started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_task_that_is_killed_in_a_step_is_named_and_restored(tmp_path):
    job = Path(__file__).with_name("placed_job.py")
    done = subprocess.run(
        [sys.executable, str(job), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    lost = "lost: lost worker:1 with /job:worker/task:1/device:cpu:0 in step 4: "
    assert lines[2].startswith(lost), lines
    # a master that has not seen the new address yet cannot reach the task
    assert lines[3] in {"stale: StaleError True", "stale: PeerLostError True"}
    assert lines[:2] + lines[4:] == [
        *("equal before: True", "pids differ: True"),
        *("equal after: True", "pending: 0"),
    ]
