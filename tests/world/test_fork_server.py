"""A rank that the fork server forks is like one that was started, but for its imports."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from braid.launch.process.child import Child
from braid.launch.process.fork_server import ForkServer
from braid.launch.process.processes import subreaper

pytestmark = [pytest.mark.procs, pytest.mark.launcher]
READY_S = 240.0  # a server is made at the lowest priority, beside ranks that use all cores
PROGRAM = """
import ctypes, json, os, sys
if "change" in sys.argv:
    os.environ["OMP_NUM_THREADS"] = "3"
is_loaded = "torch._dynamo" in sys.modules
import torch
death_signal = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death_signal))
facts = [
    sys.argv, sys.path, __name__, __file__, os.getcwd(), dict(os.environ), os.getppid(),
    os.getpgid(0) == os.getpid(), death_signal.value, sorted(map(int, os.listdir("/proc/self/fd"))),
    os.fstat(0).st_rdev, sorted(vars(sys.modules["__main__"])), torch.__spec__.name,
]
print(json.dumps([is_loaded, facts]))
os.write(int(sys.argv[1]), b"more")
raise ValueError("shard 7 is missing")
"""
STUBS = {  # which are imported faster than the modules that a server imports
    "torch/__init__.py": "import site",  # as a torch for CUDA does
    "torch/_dynamo.py": "",
    "numpy/__init__.py": "import random",
    "braid/__init__.py": "import numpy",
    "braid/context.py": "import braid.runtime.torch_internals",
    "braid/runtime/__init__.py": "",
    "braid/runtime/torch_internals.py": "is_in_bad_fork = bool",
    "braid/elasticity/__init__.py": "",
    "braid/elasticity/begin.py": "",
}


class _Launched:
    """Ranks of the program, and what they have written.

    Attributes:
        server: Server of the program.
    """

    def __init__(self, directory: Path, *arguments: str) -> None:
        for name, text in {**STUBS, "program.py": PROGRAM}.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
        self._environ = {**os.environ, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"}
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._argv = [sys.executable, str(directory / "program.py"), str(self._writer), *arguments]
        self.server = ForkServer(self._argv, self._environ)
        self.server.start()

    def run(self, server: ForkServer | None) -> tuple[list[object], bytes, int]:
        """Return what a rank has written to its streams, and its exit code."""
        output = {1: b"", 2: b""}

        def keep(stream: int, chunk: bytes) -> None:
            output[stream] += chunk

        with selectors.DefaultSelector() as selector:
            child = Child(
                self._argv,
                environ=self._environ | {"RANK": "3"},
                pass_fds=[self._writer],
                selector=selector,
                on_output=keep,
                server=server,
            )
            child.wait()
            child.close()
        assert b"shard 7" in output[2], output[2].decode()
        assert os.read(self._reader, 10) == b"more"
        return json.loads(output[1]), output[2], child._popen.returncode

    def run_forked(self) -> tuple[list[object], bytes, int]:
        """Return the same of a rank that was forked."""
        end_s = time.monotonic() + READY_S
        while not self.server.is_ready and time.monotonic() < end_s:
            result = self.run(self.server)
        return result

    def close(self) -> None:
        self.server.close()
        os.close(self._reader)
        os.close(self._writer)


@pytest.fixture
def launch(tmp_path):
    launched = []

    def launch(*arguments: str) -> _Launched:
        launched.append(_Launched(tmp_path, *arguments))
        return launched[-1]

    with subreaper():
        yield launch
        for program in launched:
            program.close()


def test_a_forked_rank_has_all_that_a_started_one_has(launch):
    program = launch()
    (is_loaded, facts), errors, code = program.run(None)
    assert not is_loaded
    assert program.run_forked() == ([True, facts], errors, code)


def test_a_program_that_changes_the_environment_before_it_imports_torch_is_executed_again(launch):
    program = launch("change")
    assert program.run_forked() == program.run(None)


def test_ranks_start_without_a_server_that_is_killed(launch):
    program = launch()
    program.run_forked()
    program.server._popen.kill()
    program.server._popen.wait()
    assert program.run(program.server)[0][0] is False
    assert program.server.fork({}, {}) is None


WAITS = """
import time
import braid
group = braid.init()
while True:
    group.barrier()
    time.sleep(0.05)
"""


@pytest.mark.all
def test_a_server_starts_beside_a_spare_and_forks_new_ranks(tmp_path):
    script, run = tmp_path / "waits.py", tmp_path / "run"
    script.write_text(WAITS)
    options = ("-n", "1", "--spares=1", "--min-ranks=1", "--restarts=50", "--log-dir", str(run))
    command = [sys.executable, "-m", "braid", "run", *options, str(script)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        try:
            end_s, used_s = time.monotonic() + READY_S, 0.0
            while not any(map(_is_forked, ranks := _started_ranks(run))):
                assert time.monotonic() < end_s
                assert job.poll() is None
                time.sleep(0.2)
                used_before_s, used_s = used_s, _cpu_time_of_server_s(job.pid)
                if len(ranks) >= 2 and used_s and used_s == used_before_s:  # it has imported all
                    with suppress(ProcessLookupError):
                        os.kill(ranks[-1], signal.SIGKILL)  # the newest is a spare
        finally:
            job.terminate()


IMPORTS = """
import os, runpy, sys
before = dict(os.environ)

class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == "torch":
            sys.exit(7 if dict(os.environ) == before else 1)

sys.meta_path.insert(0, Finder)
runpy.run_module("braid.train.worker", run_name="__main__", alter_sys=True)
"""


def test_a_rank_of_braid_train_is_not_executed_again():
    done = subprocess.run([sys.executable, "-c", IMPORTS, "{}"], check=False)
    assert done.returncode == 7, "it has changed the environment before it imports torch"


def _started_ranks(run: Path) -> list[int]:
    """Return the processes of ranks that have been started and not been lost, the newest last."""
    path = run / "events" / "launcher.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    lost = {event["rank"] for event in events if event["kind"] == "lost"}
    return [e["pid"] for e in events if e["kind"] == "started" and e["rank"] not in lost]


def _cpu_time_of_server_s(launcher: int) -> float:
    """Return the seconds of a core that the launcher's fork server has used."""
    children = psutil.Process(launcher).children()
    return sum(sum(child.cpu_times()[:2]) for child in children if _is_forked(child.pid))


def _is_forked(pid: int) -> bool:
    with suppress(OSError):  # it has ended
        return b"process/preload" in Path(f"/proc/{pid}/environ").read_bytes()
    return False
