"""The right rank is named in programs that catch everything, speak of connections, leave too early or exit slowly."""

from __future__ import annotations

from pathlib import Path

import pytest

from braid.launch import JobSpec, Outcome, QuietConsole, Supervisor

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
JOB = """
import atexit, os, socket, sys, threading, time, traceback
import torch
import braid

mode = sys.argv[1]
if mode.startswith("slow") and os.environ["RANK"] == "1":
    atexit.register(time.sleep, 60)  # runs after that of braid.init

def train():
    group = braid.init()
    if mode == "slow hook":
        sys.excepthook = lambda kind, exc, trace: None
    try:
        if mode == "handled":
            raise KeyError("harmless")
    except KeyError:
        traceback.print_exc()
    for step in range(1000):
        group.all_reduce(torch.ones(4))
        if group.rank == 1 and step == 5:
            if mode == "caught":
                raise ValueError("shard-7 is missing")
            if mode == "connection":
                socket.create_connection(("127.0.0.1", 9), timeout=5)  # nobody listens there
            if mode == "gone":
                os._exit(0)
            if mode == "swallowed":
                return
            if mode == "handled":
                print("braid: a hint is not what ended the rank", file=sys.stderr)
                os._exit(3)
            if mode == "slow exit":
                try:
                    open("/no/such/file")
                except OSError:
                    print("the data is gone", file=sys.stderr)
                    sys.exit(3)
            if mode == "slow raise":
                raise SystemExit(3)
            if mode == "slow hook":
                raise ValueError("shard-7 is missing")
            if mode == "slow thread":
                threading.Thread(target=time.sleep, args=(60,)).start()
                exit("no more data")

if mode not in {"caught", "gone", "swallowed"}:
    train()
else:
    try:
        train()
    except Exception as e:
        print(f"fatal: {e}", file=sys.stderr)
        sys.exit(mode != "swallowed")
"""


def _run(tmp_path: Path, mode: str) -> Outcome:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    job = JobSpec(
        command=(str(path), mode),
        num_ranks=3 if mode == "caught" else 2,
        log_dir=str(tmp_path / "run"),
        grace_s=1.0,
    )
    return Supervisor(QuietConsole()).run(job)


@pytest.mark.parametrize(
    ("mode", "told", "code"),
    [
        (
            "caught",
            "while handling ValueError: shard-7 is missing      job.py:23 in train\n",
            1,
        ),
        pytest.param(
            "connection",
            "ConnectionRefusedError: [Errno 111] Connection refused",
            1,
            marks=pytest.mark.proof,
        ),
        ("gone", "left early with exit code 0", 1),
        ("handled", "exited with code 3\n           last on stderr: KeyError: 'harmless'\n", 3),
        (
            "slow exit",
            "'/no/such/file'      job.py:35 in train\n           the data is gone\n",
            3,
        ),
        pytest.param(
            "slow raise",
            "left early, and had not ended when braid ended it",
            1,
            marks=pytest.mark.proof,
        ),
        pytest.param(
            "slow hook",
            "ValueError: shard-7 is missing      job.py:",
            1,
            marks=pytest.mark.proof,
        ),
        pytest.param("slow thread", "exited with code 1", 1, marks=pytest.mark.proof),
    ],
)
def test_the_rank_that_failed_first_is_the_cause(tmp_path, mode, told, code):
    outcome = _run(tmp_path, mode)
    assert [end.rank for end in outcome.cause] == [1], str(outcome)
    assert outcome.verdict.certain
    assert told in str(outcome)
    assert outcome.exit_code == code


def test_a_run_that_swallows_the_error_of_a_rank_that_left_early_says_so(tmp_path):
    outcome = _run(tmp_path, "swallowed")
    assert (outcome.exit_code, outcome.verdict.kind) == (0, "finished"), str(outcome)
    told = "  note     rank 1 left early: an operation of rank 0 failed, and was given up\n"
    assert told in str(outcome)
