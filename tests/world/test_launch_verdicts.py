"""The right rank is named in programs that catch everything, speak of connections or leave too early."""

from __future__ import annotations

from pathlib import Path

import pytest

from braid.launch import JobSpec, Outcome, QuietConsole, Supervisor

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
JOB = """
import os, socket, sys
import torch
import braid

mode = sys.argv[1]

def train():
    group = braid.init()
    for step in range(1000):
        group.all_reduce(torch.ones(4))
        if group.rank == 1 and step == 5:
            if mode == "caught":
                raise ValueError("shard-7 is missing")
            if mode == "connection":
                socket.create_connection(("127.0.0.1", 9), timeout=5)  # nobody listens there
            if mode == "gone":
                os._exit(0)

if mode == "connection":
    train()
else:
    try:
        train()
    except Exception as e:
        print(f"fatal: {e}", file=sys.stderr)
        sys.exit(1)
"""


def _run(tmp_path: Path, mode: str) -> Outcome:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    job = JobSpec(command=(str(path), mode), num_ranks=3, log_dir=str(tmp_path / "run"))
    return Supervisor(QuietConsole()).run(job)


@pytest.mark.parametrize(
    ("mode", "told", "code"),
    [
        ("caught", "exited with code 1", 1),
        ("connection", "ConnectionRefusedError: [Errno 111] Connection refused", 1),
        ("gone", "left early with exit code 0", 1),
    ],
)
def test_the_rank_that_failed_first_is_the_cause(tmp_path, mode, told, code):
    outcome = _run(tmp_path, mode)
    assert [end.rank for end in outcome.cause] == [1], str(outcome)
    assert outcome.verdict.certain
    assert told in str(outcome)
    assert outcome.exit_code == code
