"""What a piece of code left behind: threads, processes, descriptors, shared memory.

>>> with no_leaks():
...     pass
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["Belongings", "belongings", "no_leaks"]

GRACE_S = 2.0  # threads and children that are about to end may do so


class Belongings(NamedTuple):
    """What this process has, as names that can be compared."""

    threads: frozenset[str]
    children: frozenset[int]
    fds: frozenset[str]
    shared: frozenset[str]


def belongings() -> Belongings:
    """Look around."""
    fds = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            target = str(entry.readlink())
            if not target.startswith(("/proc/", "/dev/", "/usr/", "/sys/")):
                fds.add(f"{entry.name} -> {target}")
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = {line.split(maxsplit=5)[5] for line in maps if "/memfd:braid" in line}
    threads = {t.name for t in threading.enumerate() if t.name.startswith("braid")}
    children = {child.pid for child in psutil.Process().children()}
    shm = Path("/dev/shm")  # noqa: S108 - looked at, not written to
    files = {str(f) for f in shm.iterdir() if "braid" in f.name} if shm.is_dir() else set()
    return Belongings(
        frozenset(threads), frozenset(children), frozenset(fds), frozenset(shared | files)
    )


@contextlib.contextmanager
def no_leaks(allowed_children: frozenset[int] = frozenset()) -> Iterator[None]:
    """Fail if the block leaves anything behind.

    Args:
        allowed_children: Processes that may appear, such as those of a pool.

    Raises:
        AssertionError: Lists what was left.
    """
    before = belongings()
    yield
    left = _left(before, allowed_children)
    for thread in threading.enumerate():
        if thread.name in left.threads:
            thread.join(GRACE_S)
    if left.children:
        psutil.wait_procs(
            [psutil.Process(p) for p in left.children if psutil.pid_exists(p)], GRACE_S
        )
    if any(left):
        gc.collect()
        left = _left(before, allowed_children)
    problems = [
        f"{kind}: {sorted(map(str, things))}" for kind, things in left._asdict().items() if things
    ]
    if problems:
        msg = "expected nothing left behind, found " + "; ".join(problems)
        raise AssertionError(msg)


def _left(before: Belongings, allowed_children: frozenset[int]) -> Belongings:
    now = belongings()
    return Belongings(
        now.threads - before.threads,
        now.children - before.children - allowed_children,
        now.fds - before.fds,
        now.shared - before.shared,
    )
