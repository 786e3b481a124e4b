"""Program that ends the processes which a killed launcher or agent leaves behind.

Run as `python -I -S orphan_reaper.py LIMIT_S NAME=VALUE...`, with the reading end of a pipe as
stdin. The program imports nothing of braid, so it costs one bare start of the interpreter.

Problem: when an agent is killed, the kernel kills its ranks too, but not the data loaders and
shells that the ranks have started. The launcher is on another host. Ranks of an elastic run save
when their launcher is killed, and then no process ends a rank that takes too long.

Idea: the kernel also closes the pipe of a dead process. The reaper then kills every process with
the marks of that process in its environment, after `LIMIT_S` seconds in which they may end by
themselves. A process that ends its ranks itself writes into the pipe before it closes it.

Source: proc_pid_environ(5). Without /proc the reaper finds no process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

PROC = "/proc"
LOOK_S = 0.1


def marked(marks: set[bytes]) -> list[int]:
    """Return the ids of all other processes with all `marks` (NAME=VALUE) in their environment."""
    pids = []
    # pathlib is not imported here
    for name in os.listdir(PROC) if os.path.isdir(PROC) else ():  # noqa: PTH112, PTH208
        with suppress(OSError):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            with open(f"{PROC}/{name}/environ", "rb") as file:  # noqa: PTH123 - see above
                carried = marks <= set(file.read().split(b"\0"))
            if carried:
                pids.append(int(name))
    return pids


def main(limit_s: str, *names: str) -> None:
    """Wait until stdin ends, wait for the run's processes, and kill the remaining ones.

    Args:
        limit_s: Seconds to wait for the processes.
        names: Environment variables, as NAME=VALUE, that all processes of the run have.
    """
    end_s = 0.0 if os.read(0, 1) else time.monotonic() + float(limit_s)
    marks = {os.fsencode(name) for name in names}
    while marks and (pids := marked(marks)):  # a process may fork between the listing and the kill
        if time.monotonic() < end_s:
            time.sleep(LOOK_S)
            continue
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
