"""Consoles for rank output: the user's terminal, and a list in memory.

A separate thread writes to each output, so that a terminal that is not read never blocks a rank. A
regular file gets every line: the launcher waits for it. A pipe has a long queue.
Lines of several ranks are prefixed with `[rank 1]`, in colour on a terminal. `NO_COLOR` and
`TERM=dumb` are honoured (through rich).
"""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from typing import TextIO

from rich.color import ColorSystem
from rich.console import Console as RichConsole
from rich.style import Style

from braid.runtime.closing import Closing
from braid.runtime.diagnose.tracebacks import printable

__all__ = ["QuietConsole", "TerminalConsole"]

MAX_WAITING_BYTES = 2 << 20  # characters that are queued while the terminal is not read
MAX_WAITING_BYTES_PIPE = 128 << 20  # characters that are queued for a reader that is slow
COLORS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


class QuietConsole:
    """Console that keeps lines and notices in memory; for libraries and tests.

    Args:
        limited: Whether lines are limited to the rate of a terminal.
    """

    def __init__(self, *, limited: bool = False) -> None:
        self._limited = limited
        self.lines: list[tuple[int, int, bytes]] = []
        self.notices: list[str] = []

    # the launcher passes whole lines only
    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:  # noqa: ARG002
        """Keep a line of a rank; see `Console.line`."""
        self.lines.append((rank, stream, text))

    def notice(self, text: str) -> None:
        """Keep a message of the launcher."""
        self.notices.append(text)

    def is_limited(self, stream: int) -> bool:  # noqa: ARG002 - both alike
        """Return whether lines of this console are limited to the rate of a terminal."""
        return self._limited


class TerminalConsole(Closing):
    """Console that shows lines on two text streams.

    Args:
        out: Stream for the stdout of ranks.
        err: Stream for the stderr of ranks and for notices.
        prefixed: Whether lines are prefixed with `[rank r]`.
    """

    def __init__(self, out: TextIO, err: TextIO, *, prefixed: bool) -> None:
        self._streams = {1: out, 2: err}
        self._colored = {
            stream: (rich := RichConsole(file=file)).color_system is not None and not rich.no_color
            for stream, file in self._streams.items()
        }
        self._prefixed = prefixed
        self._terminals = {
            stream for stream, file in self._streams.items() if not file.closed and file.isatty()
        }
        writer = _Writer(out, is_terminal=1 in self._terminals)
        same = _place(out) == _place(err)  # then lines keep their order
        other = writer if same else _Writer(err, is_terminal=2 in self._terminals)
        self._writers = {1: writer, 2: other}

    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:
        """Show a line of a rank; the line is dropped and counted if the terminal is not read.

        A single rank keeps its own line ends, so that progress bars move. Lines of several ranks
        all end with a newline.
        """
        shown = "\n" if self._prefixed else end.decode()
        self._put(stream, self._prefix(rank, stream) + text.decode(errors="replace") + shown)

    def notice(self, text: str) -> None:
        """Show a message of the launcher."""
        self._put(2, f"braid: {printable(text)}\n")

    def is_limited(self, stream: int) -> bool:
        """Return whether the stream is a terminal."""
        return stream in self._terminals

    def close(self) -> None:
        """Show the queued lines and end the threads; waits for the terminal. Idempotent."""
        lost = sum(writer.num_lost for writer in set(self._writers.values()))
        if lost and not self._writers[2].ended:
            notice = f"braid: {lost:,} lines not shown: the output was not read in time\n"
            self._writers[2].put(self._streams[2], notice, wait=True)
        for writer in set(self._writers.values()):
            writer.close()

    def _prefix(self, rank: int, stream: int) -> str:
        if not self._prefixed:
            return ""
        prefix = f"[rank {rank}]"
        if self._colored[stream]:
            style = Style(color=COLORS[rank % len(COLORS)])
            prefix = style.render(prefix, color_system=ColorSystem.STANDARD)
        return prefix + " "

    def _put(self, stream: int, text: str) -> None:
        self._writers[stream].put(self._streams[stream], text)


class _Writer:
    """Thread that writes to one output, so that a stopped reader blocks no other output.

    Args:
        file: One of the streams that it writes to.
        is_terminal: Whether a person reads it.

    Attributes:
        num_lost: Number of lines for which there was no room.
    """

    def __init__(self, file: TextIO, *, is_terminal: bool) -> None:
        self.num_lost = 0
        self._waits_for_room = _is_regular(file)
        self._room = MAX_WAITING_BYTES if is_terminal else MAX_WAITING_BYTES_PIPE
        self._waiting: deque[tuple[TextIO, str]] = deque()
        self._num_waiting = 0  # characters in the queue
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._write_all, name="braid-launch-console", daemon=True
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def put(self, file: TextIO, text: str, *, wait: bool = False) -> None:
        """Queue a text. If the queue is full, wait for a file on a disk; else drop the text."""
        with self._changed:
            if self._num_waiting > self._room:
                if not (wait or self._waits_for_room):
                    self.num_lost += 1
                    return
                self._changed.wait_for(lambda: self._num_waiting <= self._room)
            self._waiting.append((file, text))
            self._num_waiting += len(text)
            self._changed.notify_all()

    def close(self) -> None:
        """Write the queued lines and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                file, text = self._waiting.popleft()
                is_last = not self._waiting or self._waiting[0][0] is not file
            try:
                _write(file, text)
                if is_last:  # of a run of texts for one of two streams that lead here
                    file.flush()
            except (OSError, ValueError):  # a closed pipe: `braid run ... | head`; logs go on
                pass
            with self._changed:
                self._num_waiting -= len(text)
                self._changed.notify_all()


def _write(file: TextIO, text: str) -> None:
    """Write a text; characters that the stream cannot encode become escapes."""
    try:
        file.write(text)
    except UnicodeEncodeError:
        encoding = file.encoding or "ascii"
        file.write(text.encode(encoding, errors="backslashreplace").decode(encoding))


def _is_regular(file: TextIO) -> bool:
    """Return whether `file` is a regular file, which accepts data without a reader."""
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):  # a stream in memory, or a closed one
        return False


def _place(file: TextIO) -> object:
    """Return where a stream leads: the same for two streams on one terminal, pipe or file."""
    try:
        place = os.fstat(file.fileno())
    except (OSError, ValueError):
        return id(file)
    return place.st_dev, place.st_ino
