"""Locates the threads of a stuck rank in a stack dump of `faulthandler`.

Problem: spans show which operation a rank has begun. They do not show whether the rank waits in the
operation, or does something else while the operation runs in the background.

Idea: the stack shows it. A thread that waits for other ranks has frames of braid's communication on
top. Any other thread is at a line of the user's code, perhaps inside a library.

Source: CPython's `Python/traceback.c` (`_Py_DumpTracebackThreads`): the innermost frame is first,
and `Current thread` has received the signal: the main thread, or a thread of braid. In the second
case the main thread is the last one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import PurePath
from typing import NamedTuple

from braid.runtime.diagnose.tracebacks import BRAID_ROOT, INSTALLED, StackFrame, thread_frames

__all__ = [
    "Thread",
    "main_thread",
    "parse_threads",
    "serving_thread",
    "waits_for_device",
    "waits_for_peers",
]

# with os.sep, since a directory of the user may begin with the same letters
WAITING_PACKAGES = tuple(
    str(PurePath(BRAID_ROOT, package)) + os.sep
    for package in ("comm", "runtime/transport", "runtime/message", "rpc")
)
BACKGROUND = "_run"  # first function of braid's own threads; their waits do not block the program
DATA = f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}"
CUDA = f"{os.sep}torch{os.sep}cuda{os.sep}"  # synchronizes streams and events
CALLEE = f"{os.sep}rpc{os.sep}callee.py"  # runs the calls of other ranks
LEAVING = {("context.py", "shutdown"), ("membership.py", "close")}
SHUTDOWN = ("threading.py", "_shutdown")  # the interpreter joins the remaining threads


class Thread(NamedTuple):
    """One thread of a stack dump.

    Attributes:
        current: Whether the thread has received the signal.
        frames: Frames of the thread, the innermost first.
    """

    current: bool
    frames: tuple[StackFrame, ...]

    @property
    def waits_for_peers(self) -> bool:
        """Whether the thread waits in a collective, with only library frames above it."""
        for frame in self.frames:
            if frame.file.startswith(WAITING_PACKAGES):
                return not self._is_in_background
            if not INSTALLED.search(frame.file):
                return False
        return False

    @property
    def waits_for_device(self) -> bool:
        """Whether the thread waits in a collective for the rank's own GPU."""
        libraries = list(takewhile(lambda frame: INSTALLED.search(frame.file), self.frames))
        below = self.frames[len(libraries) : len(libraries) + 1]
        return any(CUDA in frame.file for frame in libraries) and any(
            frame.file.startswith(WAITING_PACKAGES) for frame in below
        )

    @property
    def _is_in_background(self) -> bool:
        """Whether a background thread of braid waits, without running a function of the program."""
        above = takewhile(lambda frame: not frame.is_users, self.frames)
        ours = (frame for frame in above if frame.file.startswith(WAITING_PACKAGES))
        return any(frame.function == BACKGROUND for frame in ours)

    @property
    def place(self) -> str:
        """Innermost line of user code; empty if there is none."""
        return next((frame.place for frame in self.frames if frame.is_users), "")

    @property
    def call(self) -> str:
        """Library function that `place` calls, or the DataLoader that calls `place`; else empty."""
        called = ""
        for frame in self.frames:
            if frame.is_users:
                break
            called = frame.call
        loading = (frame.call for frame in reversed(self.frames) if DATA in frame.file)
        return called or next(loading, "")

    @property
    def loads_data(self) -> bool:
        """Whether the thread waits for a batch of a DataLoader, or makes one."""
        return any(DATA in frame.file for frame in self.frames)

    @property
    def is_leaving(self) -> bool:
        """Whether the program has reached its end: it leaves the job, or joins its threads."""
        ours = (f for f in self.frames if f.file.startswith(BRAID_ROOT))
        leaves = any((PurePath(f.file).name, f.function) in LEAVING for f in ours)
        return leaves or any((PurePath(f.file).name, f.function) == SHUTDOWN for f in self.frames)


def parse_threads(text: str) -> tuple[Thread, ...]:
    """Parse the threads of a stack dump; accepts any text, cut anywhere."""
    return tuple(Thread(*thread) for thread in thread_frames(text))


def main_thread(threads: Sequence[Thread]) -> Thread:
    """Return the main thread: the one that received the signal, else the last one of the dump."""
    return next((t for t in threads if t.current), threads[-1] if threads else Thread(False, ()))


def serving_thread(threads: Sequence[Thread]) -> Thread | None:
    """Return a thread that runs a function for another rank; None if there is none."""
    return next((t for t in threads if any(map(_is_callee, t.frames)) and t.place), None)


def _is_callee(frame: StackFrame) -> bool:
    return frame.file.startswith(BRAID_ROOT) and frame.file.endswith(CALLEE)


def waits_for_device(threads: Sequence[Thread]) -> bool:
    """Return whether any thread waits in a collective for the rank's own GPU."""
    return any(thread.waits_for_device for thread in threads)


def waits_for_peers(threads: Sequence[Thread]) -> bool:
    """Return whether any thread, except braid's background threads, waits in a collective."""
    return any(thread.waits_for_peers for thread in threads)
