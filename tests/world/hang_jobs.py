"""Programs of two or three ranks that stand still for a moment, each in another way.

`python hang_jobs.py NAME...` runs the functions one after the other. Rank 1 does not come until the launcher has reported it; then it comes, so that
the run ends well.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import braid

# looks are half a limit apart, and stacks take a quarter of a second
LONG_S = float(os.environ.get("HANG_JOBS_S", "1.4"))


class SlowOnce(Dataset):
    """Eight samples, of which the fifth takes its time."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4 and os.environ["RANK"] == "1":
            with end_of_report() as pipe:
                os.read(pipe, 1)
        return torch.zeros(1)


def out_of_batches() -> None:
    group, x = started()
    for _ in steps(group, 4 + (group.rank == 0)):
        group.all_reduce(x)
    if group.rank == 1:
        write_results()
        group.all_reduce(x)
    group.barrier()


def write_results() -> None:
    report = next_report()
    while not os.access(report, os.F_OK):
        # in C, where a signal ends it early: a report must not
        assert ctypes.CDLL(None).usleep(round(LONG_S * 1e6)) == 0


def stopped() -> None:
    group, x = started()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.all_reduce(x)


def holds_the_lock() -> None:
    group, x = started()
    if group.rank == 1:
        with end_of_report() as pipe:
            ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
    group.all_reduce(x)


def computes() -> None:
    group, x = started()
    if group.rank == 1:
        report = next_report()
        while not os.access(report, os.F_OK):
            re.match(r"(a+)+$", "a" * 20 + "b")
    group.all_reduce(x)


def slow_loader() -> None:
    group, x = started()
    for _ in DataLoader(SlowOnce()):
        group.all_reduce(x)


def another_group() -> None:
    """Ranks 0 and 1 meet in two groups, in another order each."""
    world, x = started()
    groups = [world.split(color=0), world.split(color=0 if world.rank < 2 else None)]
    for group in groups:
        for _ in range(3):
            if group is not None:
                group.all_reduce(x)
    if world.rank == 1:
        groups.reverse()
    for group in groups:
        if group is not None:
            group.all_reduce(x, timeout_s=LONG_S)


def new_groups() -> None:
    """Ranks 0 and 1 use two groups for the first time, in another order each."""
    world, x = started()
    groups = [world.split(color=0) for _ in range(2)]
    if world.rank == 1:
        groups.reverse()
    for group in groups:
        if group is not None:
            group.all_reduce(x, timeout_s=2 * LONG_S)  # the first of a group is given more time


def all_compute() -> None:
    """Nobody waits: an operation is under way in the background, and all ranks are busy."""
    group, x = started()
    work = group.all_reduce(x, async_op=True)
    request = group.persistent("all_reduce", group.empty((4,)))
    request.start().wait()
    later = request.start()
    time.sleep(LONG_S)
    later.wait()
    work.wait()


def next_report() -> Path:
    """Return the file that the launcher's next report will be kept in."""
    reports = (Path(os.environ["BRAID_LOG_DIR"]) / f"hang-{number}.txt" for number in count(1))
    return next(report for report in reports if not report.exists())


@contextmanager
def end_of_report() -> Iterator[int]:
    """Make a pipe that ends when the launcher has made its next report."""
    pipe, write_end = os.pipe()
    waits = f"until [ -e {shlex.quote(str(next_report()))} ]; do sleep 0.02; done"
    with subprocess.Popen(["sh", "-c", waits], stdout=write_end):
        os.close(write_end)
        yield pipe
    os.close(pipe)


def started() -> tuple[braid.Group, torch.Tensor]:
    """Past the first collectives, which are given more time."""
    group, x = braid.init(), torch.zeros(4)
    for _ in range(2):
        group.all_reduce(x)
    return group, x


def steps(group: braid.Group, count: int) -> Iterator[int]:
    for step in range(count):
        with group.context.events.span("step", seq=step):
            yield step


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
