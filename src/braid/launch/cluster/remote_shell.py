"""Starts an agent on a host, directly or through a remote shell.

A batch system can replace the remote shell: it must be able to start a process on a host, connect
two pipes, and end it. Only the agent is started this way; the ranks are children of the agent.
"""

from __future__ import annotations

import errno
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Protocol

import psutil

from braid.errors import ConfigError

__all__ = [
    "AGENT",
    "DEFAULT_RSH",
    "LocalPlacement",
    "Placed",
    "Placement",
    "RshPlacement",
    "is_here",
]

AGENT = ("-m", "braid.launch.cluster.agent_main")
# asks for no password, and notices the loss of the other host within half a minute
DEFAULT_RSH = "ssh -o BatchMode=yes -o ConnectTimeout=8 -o ServerAliveInterval=10 {host}"
# errors of this host, not of the command
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
JOINS_ARGUMENTS = frozenset({"ssh", "rsh"})  # these join their arguments and pass them to a shell


class Placed:
    """A process on this host that is an agent or connects to one, and its pipes.

    Args:
        argv: Program and arguments.

    Attributes:
        argv: Program and arguments.
        reader: Descriptor of the process's stdout; the caller closes it.
        writer: Descriptor of the process's stdin; the caller closes it.
        errors: Non-blocking descriptor of the process's stderr; the caller closes it.

    Raises:
        OSError: The program cannot be started.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = tuple(argv)
        self._popen = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # the launcher forwards Ctrl-C
        )
        pipes = (self._popen.stdin, self._popen.stdout, self._popen.stderr)
        self.writer, self.reader, self.errors = (os.dup(p.fileno()) for p in pipes if p is not None)
        for pipe in pipes:
            if pipe is not None:
                pipe.close()
        os.set_blocking(self.errors, False)

    @property
    def pid(self) -> int:
        """Process id on this host."""
        return self._popen.pid

    def status(self) -> int | None:
        """Return the exit status, as `Popen.returncode`; None while the process lives."""
        return self._popen.poll()

    def status_within(self, limit_s: float) -> int | None:
        """Return the exit status if the process ends within `limit_s` seconds; else None."""
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(limit_s)
        return None

    def signal(self, signum: int) -> None:
        """Send the process a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            self._popen.send_signal(signum)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end of the process, kill it after `timeout_s`, and return its status."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.signal(SIGKILL)
            return self._popen.wait()


class Placement(Protocol):
    """A way to start an agent, the process that starts a host's ranks."""

    def start(self) -> Placed:
        """Start the agent.

        Raises:
            ConfigError: The agent cannot be started.
        """


class LocalPlacement:
    """Starts an agent on this host."""

    def start(self) -> Placed:
        """Start the agent on this host; return its process and pipes."""
        return _placed([sys.executable, *AGENT], "this host", "is there an interpreter?")


class RshPlacement:
    """Starts an agent on another host through a remote shell.

    Args:
        host: Name of the host, as the remote shell knows it.
        rsh: Command of the remote shell, with `{host}` in place of the name; must run the program
            that is appended to it.
        python: Command of an interpreter on the host that has braid installed; the path of this
            process's interpreter when empty.

    Raises:
        ConfigError: `rsh` has no `{host}`, or cannot be split into words.
    """

    def __init__(self, host: str, rsh: str = DEFAULT_RSH, python: str = "") -> None:
        self._host = host
        argv = _words(rsh, "--rsh")
        if not any("{host}" in arg for arg in argv):
            msg = f"--rsh must contain {{host}}, got {rsh!r}: write for example 'ssh {{host}}'"
            raise ConfigError(msg)
        self._shell = [arg.replace("{host}", host) for arg in argv]
        self._python = _words(python, "--remote-python") if python else [sys.executable]

    @property
    def argv(self) -> list[str]:
        """Command that runs on this host."""
        command = [*self._python, *AGENT]
        if Path(self._shell[0]).name in JOINS_ARGUMENTS:
            command = [shlex.quote(arg) for arg in command]
        return [*self._shell, *command]

    def start(self) -> Placed:
        """Run the command."""
        advice = "install it, or name another way with --rsh"
        return _placed(self.argv, f"host {self._host}", advice)


def is_here(name: str) -> bool:
    """Return whether `name` is this host, by the names and addresses known without the network."""
    hostname = socket.gethostname()
    if name in {"localhost", hostname, hostname.partition(".")[0]}:
        return True
    addresses = (a.address for interface in psutil.net_if_addrs().values() for a in interface)
    return name.strip("[]") in set(addresses)


def _placed(argv: Sequence[str], host: str, advice: str) -> Placed:
    try:
        return Placed(argv)
    except OSError as exc:
        if exc.errno in EXHAUSTED:
            advice = (
                "use fewer hosts, or raise the limits of files and processes (ulimit -n, ulimit -u)"
            )
        msg = f"cannot reach {host}: {argv[0]}: {exc.strerror}; {advice}"
        raise ConfigError(msg) from exc


def _words(text: str, option: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as exc:
        msg = f"{option} {text!r} cannot be split into words ({exc}): check its quotes"
        raise ConfigError(msg) from exc
    if not words:
        msg = f"{option} must be a command, got {text!r}"
        raise ConfigError(msg)
    return words
