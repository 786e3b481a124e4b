"""How an agent comes to be on a host: started here, or by a command that reaches there.

This is the seam for batch systems: whatever can start a process on a host, hand it two pipes, and
end it, can carry a job. Nothing but the agent is started this way; the ranks are its children.
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
# asks for no password, and notices within half a minute that the other host is gone
DEFAULT_RSH = "ssh -o BatchMode=yes -o ConnectTimeout=8 -o ServerAliveInterval=10 {host}"
# of this host, and no fault of the command
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM})
JOINS_WORDS = frozenset({"ssh", "rsh"})  # they hand their arguments, joined, to a shell


class Placed:
    """An agent, or the command that reaches it: a process of this host, and its pipes.

    Args:
        argv: What to run here.

    Attributes:
        reader: Descriptor of what it writes; the caller closes it.
        writer: Descriptor of what it reads; the caller closes it.
        errors: Descriptor of its stderr, which does not block; the caller closes it.

    Raises:
        OSError: It cannot be run.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = tuple(argv)
        self._popen = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the launcher's to pass on
        )
        pipes = (self._popen.stdin, self._popen.stdout, self._popen.stderr)
        self.writer, self.reader, self.errors = (os.dup(p.fileno()) for p in pipes if p is not None)
        for pipe in pipes:
            if pipe is not None:
                pipe.close()
        os.set_blocking(self.errors, False)

    @property
    def pid(self) -> int:
        """Process id, on this host."""
        return self._popen.pid

    def status(self) -> int | None:
        """How it ended, as `Popen.returncode`; None while it lives."""
        return self._popen.poll()

    def status_within(self, limit_s: float) -> int | None:
        """How it ended, when it does so within `limit_s`."""
        with suppress(subprocess.TimeoutExpired):
            return self._popen.wait(limit_s)
        return None

    def signal(self, signum: int) -> None:
        """Send it a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            self._popen.send_signal(signum)

    def wait(self, timeout_s: float) -> int:
        """Wait until it has ended; after the time-out it is killed."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.signal(SIGKILL)
            return self._popen.wait()


class Placement(Protocol):
    """A way to have an agent on a host."""

    def start(self) -> Placed:
        """Start it.

        Raises:
            ConfigError: It cannot be started.
        """
        ...


class LocalPlacement:
    """An agent on this host."""

    def start(self) -> Placed:
        """Start it."""
        return _placed([sys.executable, *AGENT], "this host", "is there an interpreter?")


class RshPlacement:
    """An agent on another host, reached by a command.

    Args:
        host: Name of the host, as the command knows it.
        rsh: The command, with `{host}` where the name goes; runs the words that are put behind it.
        python: The interpreter there, as words: one in which braid is installed.

    Raises:
        ConfigError: `rsh` has no `{host}`, or cannot be read as words.
    """

    def __init__(self, host: str, rsh: str = DEFAULT_RSH, python: str = "") -> None:
        self._host = host
        words = _words(rsh, "--rsh")
        if not any("{host}" in word for word in words):
            msg = f"expected {{host}} in --rsh, found {rsh!r}: write for example 'ssh {{host}}'"
            raise ConfigError(msg)
        self._words = [word.replace("{host}", host) for word in words]
        self._python = _words(python, "--remote-python") if python else [sys.executable]

    @property
    def argv(self) -> list[str]:
        """What is run here."""
        command = [*self._python, *AGENT]
        if Path(self._words[0]).name in JOINS_WORDS:
            command = [shlex.quote(word) for word in command]
        return [*self._words, *command]

    def start(self) -> Placed:
        """Run the command."""
        advice = "install it, or name another way with --rsh"
        return _placed(self.argv, f"host {self._host}", advice)


def is_here(name: str) -> bool:
    """Whether `name` is this host, as far as can be said without asking the network."""
    own = socket.gethostname()
    if name in {"localhost", own, own.partition(".")[0]}:
        return True
    addresses = (a.address for found in psutil.net_if_addrs().values() for a in found)
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
        msg = f"expected words in {option}, found {text!r}: {exc}"
        raise ConfigError(msg) from exc
    if not words:
        msg = f"expected a command in {option}, found {text!r}"
        raise ConfigError(msg)
    return words
