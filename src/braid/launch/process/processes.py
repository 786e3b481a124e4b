"""Processes and signals: the few system calls that the launcher makes.

Problem: an exit must be seen at once, a stop is no exit, a grandchild outlives its parent and is
handed to init, and Python's Popen knows none of this. Idea: one inbox turns signals into bytes that
a selector sees; `waitid` tells exits from stops; the launcher is a *subreaper*, so every orphan of
the run becomes its child and is found and ended.

Source: waitid(2), prctl(2) PR_SET_CHILD_SUBREAPER, signal.set_wakeup_fd of the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

import psutil

from braid.diagnose import MemoryKill
from braid.errors import ConfigError

__all__ = ["Change", "SignalInbox", "changes_of", "end_descendants", "send_signal", "subreaper"]

PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_LIMIT_S = 5.0
Handler = Callable[[int, FrameType | None], Any] | int | None


class Change(NamedTuple):
    """A change of a child.

    Attributes:
        what: exited, killed, stopped or continued; lost, when its host is.
        status: Exit code, or number of the signal.
        t_ns: When, on the launcher's clock; 0 for now.
        memory_kill: Set when the kernel is known to have killed it for memory.
    """

    what: str
    status: int
    t_ns: int = 0
    memory_kill: MemoryKill | None = None


_CHANGES = {
    os.CLD_EXITED: "exited",
    os.CLD_KILLED: "killed",
    os.CLD_DUMPED: "killed",
    os.CLD_STOPPED: "stopped",
    os.CLD_TRAPPED: "stopped",
    os.CLD_CONTINUED: "continued",
}


class SignalInbox:
    """Turns the signals of this process into numbers to read, while it is open.

    SIGINT and SIGHUP stay ignored where they were, so `nohup` works.

    Raises:
        ConfigError: This is not the main thread, which alone may handle signals and whose death the
            ranks follow.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            msg = (
                "expected the launcher to run in the main thread, found "
                f"{threading.current_thread().name}: the kernel ties the life of the ranks to "
                "the thread that starts them; call Supervisor.run() from the main thread"
            )
            raise ConfigError(msg)
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._handlers: dict[int, Handler] = {}
        for signum in (signal.SIGCHLD, *FORWARDED):
            if signum is signal.SIGCHLD or signal.getsignal(signum) is not signal.SIG_IGN:
                self._handlers[signum] = signal.signal(signum, _noted)
        self._wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Descriptor for a selector."""
        return self._reader.fileno()

    def take(self) -> list[int]:
        """Signals since the last call, in order."""
        taken = b""
        with suppress(BlockingIOError):
            while chunk := self._reader.recv(4096):
                taken += chunk
        return list(taken)

    def close(self) -> None:
        """Restore what was there before. Idempotent."""
        if self._reader.fileno() < 0:
            return
        signal.set_wakeup_fd(self._wakeup_fd)
        for signum, handler in self._handlers.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._reader.close()
        self._writer.close()

    def __enter__(self) -> SignalInbox:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextmanager
def subreaper() -> Iterator[None]:
    """Become the parent of orphaned descendants, on Linux; undone at the end."""
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def changes_of(pid: int) -> list[Change]:
    """What happened to child `pid` since the last call; an exit is reaped and comes last."""
    changes: list[Change] = []
    flags = os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG
    with suppress(ChildProcessError):
        while (info := os.waitid(os.P_PID, pid, flags)) is not None and info.si_pid:
            changes.append(Change(_CHANGES[info.si_code], info.si_status))
            if changes[-1].what in {"exited", "killed"}:
                break
    return changes


def send_signal(pid: int, signum: int) -> None:
    """Signal a process that has not been reaped; one that has just ended ignores it."""
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def end_descendants(
    groups: Iterable[int], marker: Mapping[str, str], *, all_new: bool, known: frozenset[int]
) -> int:
    """Kill and reap what a run has left behind.

    Args:
        groups: Process groups of the ranks, whose leaders have been reaped.
        marker: Environment variables that processes of the run have inherited.
        all_new: Whether every descendant that is not in `known` belongs to the run; set where this
            process does nothing but launch.
        known: Children that this process had before the run.

    Returns:
        How many processes had been left behind.
    """
    own_groups = set(groups)
    ended = 0
    while (
        True
    ):  # a process may fork between the look and the kill; what it forked is found next time
        family = [p for p in psutil.Process().children(recursive=True) if p.pid not in known]
        left = [p for p in family if all_new or _belongs(p, own_groups, marker)]
        living = [p for p in left if _is_alive(p)]
        for process in living:
            with suppress(psutil.Error):
                process.kill()
        ended += len(living)
        _, alive = psutil.wait_procs(left, timeout=END_LIMIT_S)
        for process in left:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        if not living or alive:
            return ended


def _belongs(process: psutil.Process, groups: set[int], marker: Mapping[str, str]) -> bool:
    try:
        if os.getpgid(process.pid) in groups:
            return True
        environ = process.environ()
    except (OSError, psutil.Error):
        return False
    return all(environ.get(name) == value for name, value in marker.items())


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _noted(signum: int, frame: FrameType | None) -> None:
    """The wake-up descriptor carries the number; this handler is there so that the default does not act."""
