"""Ends what a killed agent leaves behind: a process beside it that does nothing but wait for its end.

Run as `python -I -S orphan_reaper.py NAME=VALUE...`, with the reading end of a pipe as stdin;
imports nothing of braid, so it costs one bare start of the interpreter.

Problem: when an agent is killed, the kernel kills its ranks with it, but not what the ranks have
started (loaders of data, shells), and the launcher is on another host. Idea: the kernel closes the
pipe of a dead agent as well; then every process with the agent's marks in its environment is
killed. After an agent that has ended its ranks itself there is none.

Source: proc_pid_environ(5). Where there is no /proc, nothing is found.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

PROC = "/proc"


def sweep(marks: set[bytes]) -> int:
    """Kill all processes that carry `marks` in their environment, but this one; returns how many there were."""
    found = 0
    for name in os.listdir(PROC) if os.path.isdir(PROC) else ():  # noqa: PTH112, PTH208 - pathlib is not imported here
        with suppress(OSError):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            with open(f"{PROC}/{name}/environ", "rb") as file:  # noqa: PTH123 - likewise
                carried = marks <= set(file.read().split(b"\0"))
            if carried:
                os.kill(int(name), signal.SIGKILL)
                found += 1
    return found


def main(marks: list[str]) -> None:
    """Wait for the end of stdin, then sweep until nothing is found."""
    os.read(0, 1)
    while marks and sweep({os.fsencode(mark) for mark in marks}):
        pass  # a process may fork between the look and the kill


if __name__ == "__main__":
    main(sys.argv[1:])
