"""Network namespaces as hosts: what the tests of this directory run on."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

__all__ = ["Done", "Lab", "done"]

HOSTS = "abcdefgh"
LIMIT_S = 120


class Done(NamedTuple):
    """What a command did; `text` is what it wrote to stderr."""

    code: int
    out: str
    text: str


class Lab:
    """Hosts a, b, ... with addresses 10.77.0.1, .2, ... on eth0.

    Args:
        size: How many.
        undo: Removes everything.
    """

    def __init__(self, size: int, undo: ExitStack) -> None:
        self.prefix = f"b{os.getpid() % 100_000}"
        bridge = f"{self.prefix}br"
        self.ip("link", "add", bridge, "type", "bridge")
        undo.callback(self.ip, "link", "del", bridge)
        self.ip("link", "set", bridge, "up")
        for number, host in enumerate(HOSTS[:size], 1):
            name, port = self.prefix + host, self.port(host)
            self.ip("netns", "add", name)
            undo.callback(self.ip, "netns", "del", name)
            self.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            undo.callback(self.ip, "link", "del", port)  # a namespace goes some time after its name
            self.ip("link", "set", port, "master", bridge, "up")
            self.ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            self.ip("-n", name, "link", "set", "eth0", "up")
            self.ip("-n", name, "link", "set", "lo", "up")

    @property
    def rsh(self) -> str:
        """For `--rsh`."""
        return f"ip netns exec {self.prefix}{{host}}"

    def port(self, host: str) -> str:
        """The bridge's end of a host's cable."""
        return f"{self.prefix}p{host}"

    def ip(self, *words: str) -> None:
        """Run `ip`."""
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def popen(self, host: str, *words: str, cwd: Path, **environ: str) -> subprocess.Popen[str]:
        """Start a command on a host."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.prefix + host, *words],
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
