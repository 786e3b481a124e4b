"""Program that ends the processes which a killed agent leaves behind.

Run as `python -I -S orphan_reaper.py NAME=VALUE...`, with the reading end of a pipe as stdin. The
program imports nothing of braid, so it costs one bare start of the interpreter.

Problem: when an agent is killed, the kernel kills its ranks too, but not the data loaders and
shells that the ranks have started. The launcher is on another host.

Idea: the kernel also closes the pipe of a dead agent. The reaper then kills every process with the
agent's marks in its environment. An agent that has ended its ranks itself leaves no such process.

Source: proc_pid_environ(5). Without /proc the reaper finds no process.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

PROC = "/proc"


def sweep(marks: set[bytes]) -> int:
    """Kill all other processes whose environment contains `marks`; return their number."""
    num_killed = 0
    # pathlib is not imported here
    for name in os.listdir(PROC) if os.path.isdir(PROC) else ():  # noqa: PTH112, PTH208
        with suppress(OSError):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            with open(f"{PROC}/{name}/environ", "rb") as file:  # noqa: PTH123 - likewise
                carried = marks <= set(file.read().split(b"\0"))
            if carried:
                os.kill(int(name), signal.SIGKILL)
                num_killed += 1
    return num_killed


def main(marks: list[str]) -> None:
    """Wait for the end of stdin, then sweep until no process is left."""
    os.read(0, 1)
    while marks and sweep({os.fsencode(mark) for mark in marks}):
        pass  # a process may fork between the listing and the kill


if __name__ == "__main__":
    main(sys.argv[1:])
