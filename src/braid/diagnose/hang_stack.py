"""Where the threads of a stuck rank are, from a dump by `faulthandler`: does it wait for others, and if not, what for?

Problem: spans say which operation a rank began; they do not say whether it waits there now or went
on to something else while the operation goes on in the background. Idea: the stack knows. A thread
that waits for others has braid's own rooms on top of it; every other thread is at a line of the
user's, perhaps inside of a library that it called.

Source: CPython's `Python/traceback.c` (`_Py_DumpTracebackThreads`): innermost frame first, `Current
thread` is the one that took the signal, which is the main thread unless that blocks it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from braid.diagnose.tracebacks import BRAID_ROOT, FRAME, INSTALLED, STACK_HEADER

__all__ = ["Frame", "Thread", "main_thread", "parse_threads", "waits_for_others"]

# os.sep, for a folder of the user's may begin with the same letters
WAITING_ROOMS = tuple(
    f"{BRAID_ROOT}{os.sep}{room}{os.sep}" for room in ("comm", "transport", "torch_backend")
)
BACKGROUND = "_run"  # what braid's own threads begin with: nobody waits when they do
LIBRARIES = re.compile(r".*[/\\](?:site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]")
CLASSES = {"torch.utils.data.dataloader": "DataLoader"}  # a dump names functions, not classes
DATA = f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}"
LEAVING = {("context.py", "shutdown"), ("membership.py", "close")}
SHUTDOWN = ("threading.py", "_shutdown")  # of the interpreter: joins what threads are left


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether it belongs neither to braid, nor to an installed package, nor to the interpreter."""
        generated = self.file.startswith("<")
        return not (generated or self.file.startswith(BRAID_ROOT) or INSTALLED.search(self.file))

    @property
    def place(self) -> str:
        """`train.py:38 in load`."""
        return f"{PurePath(self.file).name}:{self.line} in {self.function}"

    @property
    def call(self) -> str:
        """`queue.get`: the function with its module, for frames of libraries."""
        root = LIBRARIES.match(self.file)
        below = self.file[root.end() :] if root else self.file.removeprefix(BRAID_ROOT)
        module = ".".join(PurePath(below).with_suffix("").parts).strip("/\\.")
        if self.file.startswith(BRAID_ROOT):
            module = f"braid.{module.rpartition('braid.')[2]}"
        module = module.removesuffix(".__init__")
        return f"{CLASSES.get(module, module)}.{self.function}"


class Thread(NamedTuple):
    """One thread, innermost frame first."""

    current: bool
    frames: tuple[Frame, ...]

    @property
    def waits_for_others(self) -> bool:
        """Whether it is inside of a collective; the interpreter's own frames may lie on top."""
        for frame in self.frames:
            if frame.file.startswith(WAITING_ROOMS):
                return not self._is_in_background
            if not INSTALLED.search(frame.file):
                return False
        return False

    @property
    def _is_in_background(self) -> bool:
        ours = (f for f in self.frames if f.file.startswith(WAITING_ROOMS))
        return any(frame.function == BACKGROUND for frame in ours)

    @property
    def place(self) -> str:
        """The innermost line of the user's; empty when there is none."""
        return next((frame.place for frame in self.frames if frame.is_users), "")

    @property
    def call(self) -> str:
        """What that line called in a library, or the loader that called it; empty when there is nothing of the kind."""
        called = ""
        for frame in self.frames:
            if frame.is_users:
                break
            called = frame.call
        loading = (frame.call for frame in reversed(self.frames) if DATA in frame.file)
        return called or next(loading, "")

    @property
    def loads_data(self) -> bool:
        """Whether it waits for, or makes, a batch of a DataLoader."""
        return any(DATA in frame.file for frame in self.frames)

    @property
    def is_leaving(self) -> bool:
        """Whether its program has come to the end: it leaves the job, or waits for threads that have not ended."""
        ours = (f for f in self.frames if f.file.startswith(BRAID_ROOT))
        leaves = any((PurePath(f.file).name, f.function) in LEAVING for f in ours)
        return leaves or any((PurePath(f.file).name, f.function) == SHUTDOWN for f in self.frames)


def parse_threads(text: str) -> tuple[Thread, ...]:
    """The threads of a dump, in its order; text that is no dump, or cut, gives what there is."""
    threads: list[Thread] = []
    frames: list[Frame] = []
    current: bool | None = None
    for line in [*text.splitlines(), "Thread end (most recent call first):"]:
        header, frame = STACK_HEADER.match(line), FRAME.match(line)
        if header is not None:
            if current is not None and frames:
                threads.append(Thread(current, tuple(frames)))
            current, frames = header["current"] is not None, []
        elif frame is not None and current is not None:
            frames.append(Frame(frame["file"], int(frame["line"][:9]), frame["name"] or ""))
    return tuple(threads)


def main_thread(threads: Sequence[Thread]) -> Thread:
    """The thread that runs the program: it takes signals; dumps end with it where it blocks them."""
    return next((t for t in threads if t.current), threads[-1] if threads else Thread(False, ()))


def waits_for_others(threads: Sequence[Thread]) -> bool:
    """Whether any thread but those that work in the background is inside of a collective."""
    return any(thread.waits_for_others for thread in threads)
