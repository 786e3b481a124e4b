"""Starts ranks with torch already imported, by forks of one process.

Problem: a process that takes the place of a lost rank imports torch and braid for several seconds,
on the cores on which the other ranks train.

Idea: the launcher of an elastic run starts one more process of the same command line, which imports
these modules beside the training and then waits. Each new rank is a fork of it, which takes some 20
ms. The program of the process begins only in forks (`preload.sitecustomize`).

A rank is a child of the launcher with the descriptors, the environment, the process group and the
death signal that `exec_shim` would give it, with two differences: `/proc/<pid>/environ` shows the
environment of the server, and numpy, torch and braid are in `sys.modules`.

Source: the fork server of `multiprocessing`.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from braid.launch.process.job import JobSpec
from braid.runtime.rendezvous import JobEnvironment

__all__ = ["SHIM", "ForkServer", "ForkedProcess"]

SHIM = str(Path(__file__).with_name("exec_shim.py"))
PRELOAD = str(Path(__file__).with_name("preload"))
ANSWER_S = 10.0  # after which a server that was asked for a rank is given up


class ForkedProcess:
    """A child of this process that a `ForkServer` has forked, with methods of `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait until the process has ended, and reap it."""
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """A process that forks ranks; see the module. This process must be a subreaper.

    Args:
        argv: Command of the ranks: a Python interpreter with its arguments.
        environ: Environment of a rank of the run.

    Attributes:
        is_ready: Whether the server is known to have imported all modules.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self._argv = argv
        paths = [PRELOAD, *filter(None, [environ.get("PYTHONPATH")])]
        self._environ = {**environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._control, self._theirs = socket.socketpair()
        self._control.settimeout(ANSWER_S)
        self._popen: subprocess.Popen[bytes] | None = None
        self.is_ready = False

    @classmethod
    def of(
        cls,
        job: JobSpec,
        environment: JobEnvironment,
        argv: Sequence[str],
        environ: Mapping[str, str],
    ) -> ForkServer | None:
        """Return a server that forks more ranks with the settings of a started rank.

        Return None if the run cannot start more ranks, or their program is not Python.

        Args:
            job: Job of the rank.
            environment: Settings of the rank.
            argv: Program and arguments of the rank.
            environ: Environment of the rank.
        """
        limits = job.elastic
        is_fixed = limits is not None and not (limits.restarts or limits.gains_slots)
        if not environment.elastic or is_fixed or job.kind == "program" or sys.platform != "linux":
            return None
        return cls(argv, environ)

    def start(self) -> None:
        """Start the process, when the first ranks train. Idempotent."""
        if self._theirs.fileno() < 0:
            return
        with self._theirs, suppress(OSError):  # ranks start without it
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", SHIM, "own", str(os.getpid()), *self._argv],
                stdin=self._theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environ,
            )

    def fork(self, environ: Mapping[str, str], fds: Mapping[int, int]) -> ForkedProcess | None:
        """Start a rank.

        Args:
            environ: Environment of the rank.
            fds: Descriptors that the rank gets, by their numbers in the rank.

        Returns:
            The rank; None if the server has not been started, is still importing, or has ended.
        """
        try:
            if not self.is_ready:
                if not select.select([self._control], [], [], 0)[0]:
                    return None
                self.is_ready = self._line() == b"ready"
            request = {"numbers": list(fds), "environ": dict(environ)}
            socket.send_fds(self._control, [b"+"], list(fds.values()))
            self._control.sendall(json.dumps(request).encode() + b"\n")
            return ForkedProcess(int(self._line()))
        except (OSError, ValueError):
            self.close()
            return None

    def close(self) -> None:
        """End the server; ranks go on. Idempotent."""
        self._control.close()
        self._theirs.close()
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()

    def _line(self) -> bytes:
        with self._control.makefile("rb") as file:
            return file.readline().rstrip()
