"""Network namespaces as hosts: what the tests of this directory run on."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from braid.launch.chaos.hosts import NETWORK, NamespaceHosts

__all__ = ["Done", "Lab", "done"]

HOSTS = "abcdefgh"
LIMIT_S = 120


class Done(NamedTuple):
    """What a command did; `text` is what it wrote to stderr."""

    code: int
    out: str
    text: str


class Lab(NamespaceHosts):
    """Hosts a, b, ... with addresses 10.77.0.1, .2, ... on eth0.

    Args:
        size: Number of hosts.
        undo: Stack that removes everything.
        network: First three numbers of their addresses.
    """

    def __init__(self, size: int, undo: ExitStack, network: str = NETWORK) -> None:
        super().__init__(HOSTS[:size], network)
        undo.enter_context(self)

    def popen(self, host: str, *words: str, cwd: Path, **environ: str) -> subprocess.Popen[str]:
        """Start a command on a host."""
        return subprocess.Popen(
            self.on(host, words),
            cwd=cwd,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def braid(self, host: str, *words: str, cwd: Path, **environ: str) -> subprocess.Popen[str]:
        """Start `braid run` on a host."""
        return self.popen(host, sys.executable, "-m", "braid", "run", *words, cwd=cwd, **environ)

    def run(self, *words: str, cwd: Path, **environ: str) -> Done:
        """`braid run` on host a, which reaches the others, to its end."""
        return done(self.braid("a", "--rsh", self.rsh, *words, cwd=cwd, **environ))

    def processes(self, host: str) -> list[int]:
        """What runs on a host now."""
        shown = subprocess.run(
            ["ip", "netns", "pids", self.prefix + host], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in shown.stdout.split()]


def done(process: subprocess.Popen[str]) -> Done:
    """Wait for a process."""
    with process:
        try:
            out, text = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return Done(process.returncode, out, text)
