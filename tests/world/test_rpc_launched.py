"""Calls as the launcher sees them: in reports of hangs, and in the trace."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from braid.launch.observe.run_directory import read_run
from braid.launch.observe.trace import write_trace


@pytest.mark.launcher
def test_the_launcher_shows_who_waits_for_whose_call(tmp_path):
    job = Path(__file__).with_name("rpc_hang_job.py")
    command = ["run", "-n", "3", "--hang-report", "1", "--log-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "braid", *command, str(job)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = done.stderr  # the first report may come before all have joined the chain
    assert re.search(r"rank 0  call#\d+  __main__:relay, to rank 1   .*rpc_hang_job.py:\d+", report)
    assert re.search(r"rank 1  call#\d+  __main__:slow, to rank 2   .* in relay", report)
    assert re.search(r"missing  rank 2 \(pid \d+\)   at rpc_hang_job.py:\d+ in slow", report)
    trace = json.loads(write_trace(read_run(tmp_path / "run"), tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    calls = Counter(each["name"] for each in events if each.get("ph") == "X")
    assert calls["call(__main__:relay, to rank 1)"] == calls["serve(__main__:relay, for rank 0)"]
    assert sum(each["name"] == "same call" for each in events) == 2 * sum(
        count for name, count in calls.items() if name.startswith("call(")
    )
