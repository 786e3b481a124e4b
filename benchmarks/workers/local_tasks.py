"""Tasks of a cluster as processes on this host; TF_CONFIG has their addresses."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

from braid.errors import ConfigError

__all__ = [
    "BRAID",
    "TENSORFLOW",
    "LocalTasks",
    "figures_under_kills",
    "losses_of_steps",
    "rates_of_null_closures",
]

ROOT = Path(__file__).parents[2]
BRAID, TENSORFLOW = "braid_coordinator", "tensorflow_coordinator"


class LocalTasks:
    """Processes of one program, one for each task.

    Args:
        program: Module of the program, in `benchmarks.tasks`.
        args: Arguments of the program.
        python: Interpreter that runs the program.
        jobs: Number of tasks of each job; the output of task 0 of the first job is read.
        forked: Jobs with processes that are forked from one that has imported torch and braid, so
            that starting Python does not slow down the others.
    """

    def __init__(
        self,
        program: str,
        args: Sequence[str],
        jobs: dict[str, int],
        python: str = sys.executable,
        forked: Sequence[str] = (),
    ) -> None:
        self._command = [python, "-m", f"benchmarks.tasks.{program}", *args]
        self._forked = forked
        ports = _free_ports(sum(jobs.values()))
        self._speaker = next(iter(jobs))
        self._jobs = {
            job: [f"localhost:{ports.pop()}" for _ in range(count)] for job, count in jobs.items()
        }
        self._running: dict[tuple[str, int], subprocess.Popen[str]] = {}
        self._children: dict[tuple[str, int], BaseProcess] = {}

    def __enter__(self) -> LocalTasks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:
            for process in self._running.values():
                stack.enter_context(process)
                process.kill()
            for child in self._children.values():
                child.kill()

    def start(self, job: str, index: int) -> None:
        """Start a task, or start it again."""
        config = {"cluster": self._jobs, "task": {"type": job, "index": index}}
        variables = {"TF_CONFIG": json.dumps(config), "OMP_NUM_THREADS": "1"}
        if job in self._forked:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch._dynamo", "braid.strategies"])
            child = context.Process(target=_run_task, args=(self._command[2:], variables))
            child.start()
            self._children[job, index] = child
            return
        speaks = (job, index) == (self._speaker, 0)
        self._running[job, index] = subprocess.Popen(
            self._command,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE if speaks else subprocess.DEVNULL,
            stderr=None if speaks else subprocess.DEVNULL,
            cwd=ROOT,
            text=True,
        )

    def start_all(self, job: str) -> None:
        """Start all tasks of a job."""
        for index in range(len(self._jobs[job])):
            self.start(job, index)

    def kill(self, job: str, index: int) -> None:
        """Kill a task."""
        child = self._children.pop((job, index), None)
        if child is not None:
            child.kill()
            child.join()
            return
        process = self._running.pop((job, index))
        process.kill()
        process.wait()

    def wait_for(self, word: str) -> str:
        """Return the rest of the next output line that begins with a word.

        Raises:
            ConfigError: The task that prints the figures has ended.
        """
        speaker = self._running[self._speaker, 0]
        while line := speaker.stdout.readline() if speaker.stdout else "":
            first, _, rest = line.strip().partition(" ")
            if first == word:
                return rest
        msg = f"{' '.join(self._command)} ended with {speaker.wait()} before its figures came"
        raise ConfigError(msg)

    def figure(self) -> float:
        """Return the next printed figure."""
        return float(self.wait_for("figure"))


def _run_task(command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run a module with arguments as the main program of this process."""
    os.environ.update(variables)
    sys.argv = list(command)
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def figures_under_kills(phases: int, phase_s: float, every_s: float) -> tuple[list[float], int]:
    """Return the closures per second of each phase, and the number of wrong counts.

    In every second phase a worker is killed every `every_s` seconds. A running spare takes its
    place, and a new spare is started.

    Args:
        phases: Number of phases.
        phase_s: Seconds of a phase.
        every_s: Seconds between two kills.
    """
    num_kills = phases // 2 * int(phase_s / every_s)
    jobs = {"chief": 1, "ps": 1, "worker": 2, "spare": num_kills + 1}
    workers = [("worker", 0), ("worker", 1)]  # current process of each worker
    rates: list[float] = []
    args = ["counted", str(phases), str(phase_s)]
    with LocalTasks(BRAID, args, jobs, forked=["worker", "spare"]) as tasks:
        for kind in ("ps", "worker", "chief"):
            tasks.start_all(kind)
        tasks.start("spare", 0)
        killed = 0
        for phase in range(phases):
            tasks.wait_for("phase")
            begun = time.monotonic()
            for number in range(int(phase_s / every_s) if phase % 2 else 0):
                due_s = (number + 0.5) * every_s
                time.sleep(max(0.0, begun + due_s - time.monotonic()))
                tasks.kill(*workers[killed % 2])
                workers[killed % 2] = ("spare", killed)
                killed += 1
                tasks.start("spare", killed)
            rates.append(tasks.figure())
        return rates, int(tasks.figure())


def rates_of_null_closures(
    program: str, closures: int, rounds: int, python: str = sys.executable
) -> list[float]:
    """Return the null closures per second of each round, with one server and two workers."""
    jobs = {"chief": 1, "ps": 1, "worker": 2}
    args = [str(closures), str(rounds)]
    if program == BRAID:
        args = ["null", *args]
    with LocalTasks(program, args, jobs, python) as tasks:
        for kind in jobs:
            tasks.start_all(kind)
        return [tasks.figure() for _ in range(rounds)]


def losses_of_steps(program: str, steps: int, python: str = sys.executable) -> list[float]:
    """Return the loss of each step of two workers."""
    with LocalTasks(program, [str(steps)], {"worker": 2}, python) as tasks:
        tasks.start_all("worker")
        return [tasks.figure() for _ in range(steps)]


def _free_ports(count: int) -> list[int]:
    """Return ports on which no process of this host listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind(("localhost", 0))
        return [probe.getsockname()[1] for probe in sockets]
