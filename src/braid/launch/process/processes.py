"""System calls of the launcher for processes and signals.

Problem: the launcher must notice an exit immediately, distinguish a stop from an exit, and end
grandchildren that outlive their parent. Python's Popen does none of this.

Idea: one inbox turns signals into bytes that a selector can poll. `waitid` separates exits from
stops.
The launcher is a *subreaper*: the kernel makes every orphan of the run its child, so that it can
end them.

Source: waitid(2), prctl(2) PR_SET_CHILD_SUBREAPER, signal.set_wakeup_fd of the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import psutil

from braid.errors import ConfigError
from braid.runtime.closing import Closing
from braid.runtime.diagnose.verdict import MemoryKill

__all__ = [
    "Change",
    "SignalInbox",
    "changes_of",
    "end_descendants",
    "orphan_reaper",
    "send_signal",
    "subreaper",
]

PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_LIMIT_S = 5.0
REAPER = str(Path(__file__).with_name("orphan_reaper.py"))
Handler = Callable[[int, FrameType | None], Any] | int | None


class Change(NamedTuple):
    """A state change of a child process.

    Attributes:
        kind: `exited`, `killed`, `stopped` or `continued`; `lost` if its host is lost.
        status: Exit code, or number of the signal.
        t_ns: Time of the change on the launcher's clock; 0 for now.
        memory_kill: Facts about the kernel's out-of-memory kill; None if there was none.
    """

    kind: str
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


class SignalInbox(Closing):
    """Queues the signals of this process while open; a context manager.

    SIGINT and SIGHUP stay ignored where they were ignored before, so that `nohup` works.

    Raises:
        ConfigError: The caller is not the main thread. Only the main thread can handle signals, and
            ranks die with the thread that starts them.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            msg = (
                "the launcher must run in the main thread, got thread "
                f"{threading.current_thread().name}: the kernel would end all ranks with that "
                "thread. Call Supervisor.run() from the main thread"
            )
            raise ConfigError(msg)
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._handlers: dict[int, Handler] = {}
        for signum in (signal.SIGCHLD, *FORWARDED):
            if signum is signal.SIGCHLD or signal.getsignal(signum) is not signal.SIG_IGN:
                self._handlers[signum] = signal.signal(signum, _no_action)
        self._wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Return the descriptor that a selector can poll."""
        return self._reader.fileno()

    def drain(self) -> list[int]:
        """Return the signals since the last call, in order."""
        received = b""
        with suppress(BlockingIOError):
            while chunk := self._reader.recv(4096):
                received += chunk
        return list(received)

    def close(self) -> None:
        """Restore the previous signal handlers. Idempotent."""
        if self._reader.fileno() < 0:
            return
        signal.set_wakeup_fd(self._wakeup_fd)
        for signum, handler in self._handlers.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        self._reader.close()
        self._writer.close()


@contextmanager
def subreaper() -> Iterator[None]:
    """Make this process the parent of its orphaned descendants inside the block (Linux only)."""
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


@contextmanager
def orphan_reaper(run_id: str, limit_s: float) -> Iterator[int]:
    """Run the orphan reaper, which ends the run's processes if this process is killed.

    Args:
        run_id: Name of the run.
        limit_s: Seconds that the processes then have to end by themselves.

    Yields:
        Process id of the reaper.
    """
    marks = (f"BRAID_RUN_ID={run_id}", f"BRAID_LAUNCHER_PID={os.getpid()}")  # see `rank_environ`
    reaper = subprocess.Popen(
        [sys.executable, "-I", "-S", REAPER, str(limit_s), *marks],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a signal to the group of this process spares the reaper
    )
    with reaper:  # closes its stdin and waits
        try:
            yield reaper.pid
        finally:
            assert reaper.stdin is not None
            with suppress(BrokenPipeError):  # somebody has killed it
                reaper.stdin.write(b".")
                reaper.stdin.flush()


def changes_of(pid: int) -> list[Change]:
    """Return the state changes of child `pid` since the last call; an exit is reaped, and last."""
    changes: list[Change] = []
    flags = os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOHANG
    with suppress(ChildProcessError):
        while (info := os.waitid(os.P_PID, pid, flags)) is not None and info.si_pid:
            changes.append(Change(_CHANGES[info.si_code], info.si_status))
            if changes[-1].kind in {"exited", "killed"}:
                break
    return changes


def send_signal(pid: int, signum: int) -> None:
    """Send a signal to a process that has not been reaped; no-op if it has just ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def send_signal_to_thread(pid: int, thread: int, signum: int) -> None:
    """Send a signal to one thread of a process; to the process where the system cannot do that."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None) if sys.platform == "linux" else None
    if tgkill is None or tgkill(pid, thread, int(signum)) != 0:
        send_signal(pid, signum)


def end_descendants(
    groups: Iterable[int], marker: Mapping[str, str], *, all_new: bool, known: frozenset[int]
) -> int:
    """Kill and reap the processes that a run has left behind.

    Args:
        groups: Process groups of the ranks; their leaders have been reaped.
        marker: Environment variables that processes of the run have inherited.
        all_new: Whether every descendant that is not in `known` belongs to the run. Set if this
            process does nothing but launch.
        known: Descendants that this process had before the run.

    Returns:
        Number of processes that were left behind.
    """
    own_groups = set(groups)
    ended = 0
    while True:  # a process may fork between the listing and the kill
        family = [p for p in psutil.Process().children(recursive=True) if p.pid not in known]
        remaining = [p for p in family if all_new or _belongs(p, own_groups, marker)]
        living = [p for p in remaining if _is_alive(p)]
        for process in living:
            with suppress(psutil.Error):
                process.kill()
        ended += len(living)
        _, alive = psutil.wait_procs(remaining, timeout=END_LIMIT_S)
        for process in remaining:
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


def _no_action(signum: int, frame: FrameType | None) -> None:
    """Do nothing instead of a signal's default action; its number is in the wake-up descriptor."""
