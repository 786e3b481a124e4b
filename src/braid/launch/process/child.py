"""Starts the process of a rank and reads its output, for the launcher or an agent."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from signal import SIGINT

from braid.launch.process.fork_server import SHIM, ForkedProcess, ForkServer
from braid.launch.process.processes import Change, send_signal

__all__ = ["Child", "LauncherInput"]

READ_BYTES = 1 << 16
DRAIN_READS = 64  # 4 MiB: more than a pipe holds, less than a grandchild that never stops writing


class LauncherInput:
    """Standard input of this process, and the modes of its terminal.

    Problem: `breakpoint()` needs a terminal, and N ranks that read one terminal steal each other's
    keys.

    Idea: `braid run --stdin RANK` hands standard input to one rank. If that is a terminal, the rank
    gets the terminal for its standard output, too, so that line editing works, and stays in the
    launcher's process group, which is in the foreground. Its stderr still goes to its log.

    Attributes:
        fd: Descriptor to read from.
        out_fd: Descriptor of the terminal to write to, if `is_terminal`.
        is_terminal: Whether a person types the input and reads the output.
    """

    def __init__(self) -> None:
        self.fd, self.out_fd = 0, 1
        self.is_terminal = os.isatty(self.fd) and os.isatty(self.out_fd)
        self._modes = termios.tcgetattr(self.fd) if self.is_terminal else None

    def restore(self) -> None:
        """Restore the terminal's modes, which a process that was killed may have changed."""
        if self._modes is not None:
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self.fd, termios.TCSADRAIN, self._modes)


class Child:
    """A child process and the pipes of its output; the child dies with the thread that started it.

    Args:
        argv: Program and arguments.
        environ: Environment of the process.
        pass_fds: Descriptors that the process inherits.
        selector: Selector that polls the pipes; the data of a key is the function to call.
        on_output: Called with the stream (1 or 2) and the bytes that were written to it.
        stdin: Standard input of the process; None for an empty one.
        server: Server that forks the process if it is ready and `stdin` is None; None for none.

    Attributes:
        alive: Whether the process has not been reaped.

    Raises:
        OSError: The system cannot start another process.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str],
        pass_fds: Sequence[int],
        selector: selectors.BaseSelector,
        on_output: Callable[[int, bytes], None],
        stdin: LauncherInput | None = None,
        server: ForkServer | None = None,
    ) -> None:
        self.alive = True
        self._terminal = stdin if stdin is not None and stdin.is_terminal else None
        self._selector = selector
        self._on_output = on_output
        self._paused = False
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        self._pipes = dict(zip(readers, (1, 2), strict=True))  # descriptor -> stream
        group = "own" if self._terminal is None else "shared"
        forked: ForkedProcess | None = None
        if server is not None and stdin is None:
            fds = dict(zip((1, 2, *pass_fds), (*writers, *pass_fds), strict=True))
            forked = server.fork(environ, fds)
        self._popen: ForkedProcess | subprocess.Popen[bytes]
        try:
            self._popen = forked or subprocess.Popen(
                [sys.executable, "-I", "-S", SHIM, group, str(os.getpid()), *argv],
                stdin=subprocess.DEVNULL if stdin is None else stdin.fd,
                stdout=writers[0] if self._terminal is None else self._terminal.out_fd,
                stderr=writers[1],
                env=dict(environ),
                pass_fds=pass_fds,
            )
        except OSError:
            for fd in readers:
                os.close(fd)
            raise
        finally:
            for fd in writers:
                os.close(fd)
        for fd in readers:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ, partial(self._read, fd))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    def signal(self, signum: int) -> None:
        """Send the process a signal, unless it has been reaped.

        Ctrl-C has reached a process with the terminal before the launcher, so SIGINT is not sent.
        """
        if self.alive and not (self._terminal is not None and signum == SIGINT):
            send_signal(self.pid, signum)

    def wait(self) -> None:
        """Wait until the process has ended, and reap it."""
        self._popen.wait()
        self.alive = False

    def reaped(self, change: Change) -> None:
        """Record the end of the process after `changes_of` has reaped it."""
        self._popen.returncode = change.status if change.kind == "exited" else -change.status
        self.alive = False

    def drain(self) -> None:
        """Read all output that is in the pipes now."""
        for fd in list(self._pipes):
            for _ in range(DRAIN_READS):
                if not self._read(fd):
                    break

    def pause(self, *, paused: bool) -> None:
        """Stop reading the output, so that the process blocks on full pipes, or resume reading."""
        if paused == self._paused:
            return
        self._paused = paused
        for fd in self._pipes:
            if paused:
                self._selector.unregister(fd)
            else:
                self._selector.register(fd, selectors.EVENT_READ, partial(self._read, fd))

    def close(self) -> None:
        """Read the remaining output and close the pipes; the process must be reaped. Idempotent."""
        if self._terminal is not None:
            self._terminal.restore()
        self.drain()
        for fd in list(self._pipes):
            self._close_pipe(fd)

    def _read(self, fd: int) -> bool:
        """Read one chunk from a pipe; return whether there was any."""
        if fd not in self._pipes:
            return False
        try:
            chunk = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._close_pipe(fd)
            return False
        self._on_output(self._pipes[fd], chunk)
        return True

    def _close_pipe(self, fd: int) -> None:
        if not self._paused:
            self._selector.unregister(fd)
        del self._pipes[fd]
        os.close(fd)
