"""Detects what a piece of code leaves behind: threads, processes, descriptors, shared memory.

Only things of this process count, so that several test processes can run on one machine at the
same time.

>>> with no_leaks():
...     pass
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["Belongings", "ImportFreezer", "belongings", "described", "left_since", "no_leaks"]

GRACE_S = 2.0  # threads and children that are about to end may do so
MANY_MODULES = 20  # from which on their objects slow down collections
NOT_OURS = ("/proc/", "/dev/", "/usr/", "/sys/")  # descriptors of files that every process may have


class Belongings(NamedTuple):
    """Names of this process's threads, children, descriptors and shared memory, to be compared."""

    threads: frozenset[str] = frozenset()
    children: frozenset[int] = frozenset()
    fds: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()


def belongings() -> Belongings:
    """List the belongings of this process.

    Cost: about 1 ms in a process that has imported torch.
    """
    return Belongings(
        frozenset(t.name for t in threading.enumerate() if t.name.startswith("braid")),
        frozenset(_children()),
        frozenset(_descriptors()),
        frozenset(_shared_memory()),
    )


def left_since(before: Belongings, allowed: Callable[[], Belongings] | None = None) -> Belongings:
    """List the belongings of this process that are not in `before`.

    Threads and children that are about to end get some time; cyclic garbage is collected first.

    Args:
        before: An earlier result of `belongings`.
        allowed: Returns belongings that may have appeared.
    """
    left = _new(before, allowed)
    _join(left)
    if left.children:
        known = [psutil.Process(p) for p in left.children if psutil.pid_exists(p)]
        psutil.wait_procs(known, GRACE_S)
    for _ in range(2):  # what the first round frees may have held the rest from outside of Python
        if any(left):
            gc.collect()
            _join(left)  # an executor without an owner ends its threads
            left = _new(before, allowed)
    return left


def _join(left: Belongings) -> None:
    for thread in threading.enumerate():
        if thread.name in left.threads:
            thread.join(GRACE_S)


def described(left: Belongings) -> str:
    """Describe the belongings as text; empty when there are none."""
    kinds = left._asdict().items()
    return "; ".join(f"{kind}: {sorted(map(str, things))}" for kind, things in kinds if things)


class ImportFreezer:
    """Hides objects made by imports from the garbage collector.

    A collection then costs a millisecond instead of a hundred in a process that has imported the
    compiler of torch. Call it where no test is under way: objects alive then are never collected.
    """

    def __init__(self) -> None:
        self._num_modules = 0

    def __call__(self) -> None:
        """Freeze the heap if many modules were imported since the last freeze."""
        if len(sys.modules) - self._num_modules >= MANY_MODULES:
            self._num_modules = len(sys.modules)
            gc.collect()
            gc.freeze()


@contextlib.contextmanager
def no_leaks(allowed: Callable[[], Belongings] | None = None) -> Iterator[None]:
    """Fail if the block leaves anything behind.

    Args:
        allowed: Returns what may have appeared when the block has ended, such as the processes of a
            pool.

    Raises:
        AssertionError: The block left something behind; the message lists it.
    """
    before = belongings()
    yield
    problems = described(left_since(before, allowed))
    if problems:
        msg = f"The test left something behind: {problems}"
        raise AssertionError(msg)


def _new(before: Belongings, allowed: Callable[[], Belongings] | None) -> Belongings:
    now, may = belongings(), allowed() if allowed else Belongings()
    return Belongings(
        now.threads - before.threads - may.threads,
        now.children - before.children - may.children,
        now.fds - before.fds - may.fds,
        now.shared - before.shared - may.shared,
    )


def _children() -> set[int]:
    tasks = Path("/proc/self/task")
    try:
        return {
            int(pid)
            for task in os.listdir(tasks)  # noqa: PTH208 - without an object for each
            for pid in (tasks / task / "children").read_text().split()
        }
    except OSError:  # no such system, or a thread that has just ended
        return {child.pid for child in psutil.Process().children()}


def _descriptors() -> Iterator[str]:
    folder = "/proc/self/fd"
    if not Path(folder).is_dir():
        return
    for number in os.listdir(folder):  # noqa: PTH208 - without an object for each
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            target = os.readlink(f"{folder}/{number}")  # noqa: PTH115 - without an object for each
            if not target.startswith(NOT_OURS):
                yield f"{number} -> {target}"


def _shared_memory() -> Iterator[str]:
    maps = Path("/proc/self/maps")
    if maps.exists():
        text = maps.read_text()
        if "/memfd:braid" in text:
            lines = text.splitlines()
            yield from (line.split(maxsplit=5)[5] for line in lines if "/memfd:braid" in line)
    files = Path("/dev/shm")
    if files.is_dir():
        mine = f"_{os.getpid()}_"  # as torch names the memory of its shared tensors
        yield from (str(files / name) for name in os.listdir(files) if mine in name)  # noqa: PTH208
