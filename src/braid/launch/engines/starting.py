"""Starts agents by commands such as srun and mpirun, and reports those that end badly.

client ── invitation ──> stdin of each command ──> agents
<── stderr ────── the engine's messages about its nodes
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from braid.errors import ConfigError
from braid.launch.engines.client_words import FromClient

__all__ = ["AGENT", "Command", "run_commands"]

AGENT = (sys.executable, "-m", "braid.launch.engines.joined_agent")
CHUNK = 4096
END_LIMIT_S = 3.0  # from the end of the launcher to the end of the agents
KILL_LIMIT_S = 2.0


class Command(NamedTuple):
    """A command that starts agents, which start the ranks of their hosts.

    Attributes:
        argv: Program and arguments.
        line: Line to write to its stdin: the invitation with which its agents connect to the
            launcher.
        lost: Function of a line of its stderr that returns the lost node and the reason, if the
            line reports one; else None.
        node: Number of the agent's node; -1 if the command starts several agents.
    """

    argv: Sequence[str]
    line: bytes
    lost: Callable[[str], tuple[int, str] | None] = lambda _: None
    node: int = -1


def run_commands(commands: Sequence[Command], environ: Mapping[str, str]) -> int:
    """Run commands to their ends; return the exit code of the first that failed, or 0.

    Raises:
        ConfigError: A command cannot be started.
    """
    running: dict[int, tuple[Command, subprocess.Popen[bytes]]] = {}
    partial: dict[int, bytes] = {}
    code, deadline_s = 0, math.inf
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with selectors.DefaultSelector() as selector:
            for command in commands:
                process = _start(command, environ)
                assert process.stderr is not None
                fd = process.stderr.fileno()
                selector.register(fd, selectors.EVENT_READ)
                running[fd], partial[fd] = (command, process), b""
            selector.register(0, selectors.EVENT_READ)
            while running and time.monotonic() < deadline_s:
                for key, _ in selector.select(min(1.0, max(0.0, deadline_s - time.monotonic()))):
                    fd = key.fd
                    chunk = os.read(fd, CHUNK)
                    if fd == 0:  # the launcher is done, and agents end by themselves
                        selector.unregister(0)
                        deadline_s = time.monotonic() + END_LIMIT_S
                        continue
                    command, process = running[fd]
                    if chunk:
                        os.write(2, chunk)
                        *lines, partial[fd] = (partial[fd] + chunk).split(b"\n")
                        _report(command, lines)
                        continue
                    selector.unregister(fd)
                    del running[fd]
                    status = process.wait()
                    if status and command.node >= 0:
                        how = f"ended with {command.argv[0]}, exit code {status}"
                        FromClient(lost=command.node, why=how).send()
                    code = code or status
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            try:
                process.wait(KILL_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return code


def _start(command: Command, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        process = subprocess.Popen(
            command.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environ,
            bufsize=0,
        )
    except OSError as exc:
        msg = f"cannot start {command.argv[0]}: {exc.strerror}"
        raise ConfigError(msg) from exc
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # its stderr has the reason
        process.stdin.write(command.line)  # stays open: some engines end a process at end of input
    return process


def _report(command: Command, lines: Sequence[bytes]) -> None:
    for line in lines:
        lost = command.lost(line.decode(errors="replace").strip())
        if lost is not None:
            FromClient(lost=lost[0], why=lost[1]).send()
