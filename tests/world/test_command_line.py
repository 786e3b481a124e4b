"""The command `braid` as a process: what it leaves to the interpreter's end, which no call of `main` shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launcher
FULL = """braid: stopped (exit 74)
  problem  No space left on device: the standard output
           make room there, or send the output elsewhere
"""


@pytest.fixture(params=["1", ""], ids=["unbuffered", "buffered"])
def braid(request):
    """`braid(stdout, *arguments)`: exit code and stderr."""

    def run(stdout: int, *arguments: str) -> tuple[int, str]:
        ended = subprocess.run(
            [sys.executable, "-m", "braid", *arguments],
            stdout=stdout,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": request.param},
            check=False,
        )
        return ended.returncode, ended.stderr.decode()

    return run


def test_a_reader_that_has_gone_hears_no_complaint(braid):
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        assert braid(write_end, "--help") == (141, "")
    finally:
        os.close(write_end)


def test_a_full_disk_is_told_once(braid):
    with Path("/dev/full").open("wb") as full:
        assert braid(full.fileno(), "--version") == (74, FULL)


def test_a_job_has_its_own_exit_code_whoever_reads_it(braid, tmp_path):
    job = ("run", "--log-dir", str(tmp_path / "run"), "--no-python", "echo", "word")
    with Path("/dev/full").open("wb") as full:
        code, told = braid(full.fileno(), *job)
    assert (code, "Exception" in told) == (0, False)
    assert "word" in (tmp_path / "run/rank0.log").read_text()


def test_a_rank_starts_without_modules_that_it_does_not_need(tmp_path):
    code = (
        "import torch, sys; before = set(sys.modules); import braid; braid.init()\n"
        "seldom = {'psutil', 'statistics', 'braid.runtime.rendezvous.engine_job', 'braid.cli', 'rich'}\n"
        "assert not seldom & (set(sys.modules) - before), seldom & (set(sys.modules) - before)"
    )
    (tmp_path / "start.py").write_text(code)
    command = [sys.executable, "-m", "braid", "run", "-n", "1", "start.py"]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
