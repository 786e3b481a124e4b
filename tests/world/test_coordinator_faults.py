"""Workers, servers and the coordinator are killed: each closure's update is counted once."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

import pytest

pytestmark = pytest.mark.procs

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from braid.ps import Options
from braid.strategies.coordinator import ClusterCoordinator
from braid.strategies.parameter_server import ParameterServerStrategy

COUNT = 120
strategy = ParameterServerStrategy(
    options=Options(replicas=int(os.environ["REPLICAS"]), journal=Path("journal"), on_worker_loss="wait")
)

class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(COUNT))

    def forward(self, number):
        return -self.counts[number]

with strategy.scope():
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

def data():
    time.sleep(0.3)
    print("made data", flush=True)
    return range(10**9)

def count(batches, number):
    next(batches)
    optimizer.zero_grad()
    model(number).backward()
    time.sleep(0.01)
    optimizer.step()
    time.sleep(0.01)

def main():
    coordinator = ClusterCoordinator(strategy)
    first = coordinator.resume() if "again" in sys.argv else 0
    print("begins at", first, flush=True)
    batches = coordinator.create_per_worker_dataset(data)
    for number in range(first, COUNT):
        value = coordinator.schedule(count, (batches, number))
        if number % 20 == 0:
            value.fetch()
            print("closure", number, flush=True)
    coordinator.join(timeout_s=60)
    coordinator.pull()
    counts = model.counts.tolist()
    wrong = {n: c for n, c in enumerate(counts) if c != 1}
    print("wrong counts", wrong, flush=True)
    coordinator.close()

if __name__ == "__main__":
    main() if strategy.is_chief else strategy.serve()
"""
PORTS = itertools.count(1)


class Tasks:
    """The tasks of a cluster, as processes that find each other by TF_CONFIG."""

    def __init__(self, directory: Path, servers: int, workers: int, replicas: int = 0) -> None:
        self.directory, self.replicas = directory, replicas
        (directory / "program.py").write_text(PROGRAM)
        port = itertools.count(20000 + os.getpid() % 1000 * 40 + next(PORTS) * 10)
        numbers = {"chief": 1, "ps": servers, "worker": workers}
        self.jobs = {
            job: [f"localhost:{next(port)}" for _ in range(number)]
            for job, number in numbers.items()
        }
        self.lines: Queue[str] = Queue()
        self.readers: list[Thread] = []
        self.all_lines: list[str] = []
        self.running: dict[tuple[str, int], subprocess.Popen[str]] = {}
        for job, number in numbers.items():
            for index in range(number):
                self.start(job, index)

    def start(self, job: str, index: int, *args: str) -> None:
        config = {"cluster": self.jobs, "task": {"type": job, "index": index}}
        process = subprocess.Popen(
            [sys.executable, "program.py", *args],
            cwd=self.directory,
            env={
                **os.environ,
                "TF_CONFIG": json.dumps(config),
                "REPLICAS": str(self.replicas),
                "OMP_NUM_THREADS": "1",
            },
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.running[job, index] = process
        reader = Thread(target=self._read, args=(process, f"{job} {index}: "), daemon=True)
        self.readers.append(reader)
        reader.start()

    def _read(self, process: subprocess.Popen[str], prefix: str) -> None:
        with process:
            for line in process.stdout or ():
                self.lines.put(prefix + line.rstrip())

    def kill(self, job: str, index: int) -> None:
        process = self.running.pop((job, index))
        process.kill()
        process.wait()

    def wait_for(self, text: str, timeout_s: float = 90.0) -> str:
        until = time.monotonic() + timeout_s
        while True:
            try:
                line = self.lines.get(timeout=max(0.01, until - time.monotonic()))
            except Empty:
                raise AssertionError("\n".join(["no " + text, *self.all_lines])) from None
            self.all_lines.append(line)
            if text in line:
                return line

    def end(self) -> None:
        assert self.wait_for("wrong counts").endswith("wrong counts {}")
        for (job, _), process in self.running.items():
            assert process.wait(30) == 0, job


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[object]:
    opened: list[Tasks] = []

    def begin(*args: int, **kwargs: int) -> Tasks:
        opened.append(Tasks(tmp_path, *args, **kwargs))
        return opened[0]

    yield begin
    for cluster in opened:
        for process in cluster.running.values():
            process.kill()
        for reader in cluster.readers:
            reader.join(30)


def test_workers_that_are_killed_again_and_again_cost_no_closure(tasks):
    cluster = tasks(1, 2)
    cluster.wait_for("made data")
    cluster.kill("worker", 0)  # perhaps while it makes its data
    cluster.start("worker", 0)
    cluster.wait_for("closure 20")
    cluster.kill("worker", 1)
    cluster.start("worker", 1)
    cluster.wait_for("closure 60")
    for index in range(2):
        cluster.kill("worker", index)
    for index in range(2):
        cluster.start("worker", index)
    cluster.end()


def test_a_server_that_is_killed_costs_no_update(tasks):
    cluster = tasks(2, 2, replicas=1)
    cluster.wait_for("closure 40")
    cluster.kill("ps", 1)
    cluster.end()


def test_a_coordinator_that_is_started_again_goes_on(tasks):
    cluster = tasks(1, 2)
    cluster.wait_for("closure 40")
    cluster.kill("chief", 0)
    cluster.start("chief", 0, "again")
    line = cluster.wait_for("begins at")
    assert 30 < int(line.rpartition(" ")[2]) < 60
    cluster.end()


def test_a_coordinator_that_does_not_resume_is_refused(tasks):
    cluster = tasks(1, 1)
    cluster.wait_for("closure 20")
    cluster.kill("chief", 0)
    cluster.start("chief", 0)
    cluster.wait_for("call coordinator.resume()")


def test_a_server_that_is_lost_with_the_only_copy_ends_the_run(tasks):
    cluster = tasks(2, 1)
    cluster.wait_for("closure 20")
    cluster.kill("ps", 0)
    cluster.wait_for("lost server 0")
    assert cluster.running["chief", 0].wait(30) == 1
