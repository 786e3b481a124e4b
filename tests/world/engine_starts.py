"""Set-up that tests of engines share: launchers under test, and what a job must not leave behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from braid.launch import JobSpec, Outcome, QuietConsole
from braid.launch.engines.client import EngineSupervisor
from braid.launch.engines.options import EngineOptions
from support.launch_conformance import Start
from support.leaks import no_leaks

__all__ = [
    "ELASTIC",
    "ELASTIC_JOB",
    "ENGINES",
    "MARK",
    "agents_of",
    "digests_in",
    "nothing_left",
    "on_engine",
    "run",
    "undisturbed_digests",
    "wait_for_ranks",
]

ENGINES = ("ray", "slurm", "mpi")
ELASTIC = ("--min-ranks", "1", "--restarts", "0", "--threads", "1")
ELASTIC_JOB = str(Path(__file__).with_name("elastic_job.py"))
LIMIT_S = 240.0
MARK = "BRAID_TEST_MARK"
AGENT = ["-m", "braid.launch.engines.joined_agent"]


def on_engine(engine: str, words: tuple[str, ...] = (), **options: object) -> Start:
    """A launcher that runs jobs on an engine."""

    def start(job: JobSpec, console: QuietConsole) -> Outcome:
        where = EngineOptions(
            engine=engine, num_ranks=job.num_ranks, words=words, environ=(MARK,), **options
        )
        return EngineSupervisor(console).run_on(job, where)

    return start


def run(*words: str, cwd: Path) -> subprocess.Popen[str]:
    """Start `braid run`."""
    command = [sys.executable, "-m", "braid", "run", *words]
    return subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def digests_in(text: str) -> set[str]:
    """Digests of the state that ranks of `ELASTIC_JOB` have printed."""
    return set(re.findall(r"\b[0-9a-f]{64}\b", text))


def undisturbed_digests(cwd: Path) -> set[str]:
    """Digests that ranks of `ELASTIC_JOB` print if none is lost, from a run on one rank."""
    out, text = run("-n", "1", *ELASTIC, ELASTIC_JOB, cwd=cwd).communicate(timeout=LIMIT_S)
    found = digests_in(out)
    assert len(found) == 1, text
    return found


def agents_of(mark: str) -> list[psutil.Process]:
    """Agents on this machine whose ranks have a mark in their environment."""
    found = {}
    for rank in psutil.process_iter():
        with suppress(psutil.Error):
            parent = rank.parent()
            if rank.environ().get(MARK) == mark and parent and parent.cmdline()[1:] == AGENT:
                found[parent.pid] = parent
    return [found[pid] for pid in sorted(found)]


def marked(mark: str) -> list[str]:
    """Processes of this machine that have a mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
    return found


def wait_for_ranks(mark: str) -> None:
    """Wait for ranks without a launcher, which save or are killed."""
    deadline_s = time.monotonic() + LIMIT_S
    while marked(mark) and time.monotonic() < deadline_s:
        time.sleep(0.05)


@contextmanager
def nothing_left(mark: str) -> Iterator[None]:
    """Fail if a job leaves a process with a mark on this machine, or anything in this process."""
    os.environ[MARK] = mark
    try:
        with no_leaks():
            yield
        deadline_s = time.monotonic() + 5.0
        while marked(mark) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert marked(mark) == []
    finally:
        del os.environ[MARK]
