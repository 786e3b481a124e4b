"""Programs of two or three ranks that stand still for a moment, each in another way.

`python hang_jobs.py NAME...` runs the functions one after the other. Rank 1 does not come, for long enough to be reported with a limit of half a
second; then it comes, so that the run ends well.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

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
            time.sleep(LONG_S)
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
        read_end, write_end = os.pipe()
        child = subprocess.Popen(["sleep", str(LONG_S)], stdout=write_end)
        os.close(write_end)
        ctypes.PyDLL(None).read(read_end, ctypes.create_string_buffer(1), 1)  # until it has ended
        child.wait()
        os.close(read_end)
    group.all_reduce(x)


def computes() -> None:
    group, x = started()
    if group.rank == 1:
        end_s = time.monotonic() + LONG_S
        while time.monotonic() < end_s:
            re.match(r"(a+)+$", "a" * 16 + "b")
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
