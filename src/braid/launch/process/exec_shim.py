"""Makes a rank die with its launcher, then executes the rank's program.

Run as `python -I -S exec_shim.py own|shared LAUNCHER_PID PROGRAM ARG...`. The shim imports nothing
of braid, so it costs one bare start of the interpreter (some 15 ms). A `preexec_fn` would run
Python between fork and exec of a process that has threads, which may deadlock.

    setpgid                    Ctrl-C reaches the launcher alone, which forwards it once; a rank
                               that reads the terminal shares the launcher's group, since only the
                               group in the foreground may read it
    PR_SET_PDEATHSIG SIGKILL   no orphan remains when the launcher is killed (an elastic training
                               makes it SIGTERM, to save first); the kernel sends it when the
                               *thread* that spawned this process ends, so the launcher spawns from
                               its main thread; execv keeps it
    getppid                    the launcher may have died before the line above

Source: prctl(2), PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CANNOT_RUN = 127  # the shell's exit code for a program that cannot be started


def main(argv: list[str]) -> int:
    """Execute `argv[2:]` as a child of process `argv[1]`; return the exit code if that fails.

    Args:
        argv: Process group (`own` or `shared` with the launcher), process id of the launcher,
            program and its arguments.
    """
    group, launcher, program = argv[0], int(argv[1]), argv[2:]
    if group == "own":
        os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:
        return 128 + signal.SIGKILL
    try:
        os.execv(program[0], program)  # noqa: S606 - becoming the user's program is the point
    except OSError as exc:
        os.write(2, f"braid: cannot start {program[0]}: {exc.strerror}\n".encode())
    return CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
