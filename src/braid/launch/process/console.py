"""Consoles for rank output: the user's terminal, and a list in memory.

A thread of its own writes to the terminal, so that a terminal that nobody reads blocks no rank. A
regular file takes every line: the launcher waits for it. A pipe has a long queue.
Lines of several ranks are prefixed with `[rank 1]`, in colour on a terminal. `NO_COLOR` and
`TERM=dumb` are honoured (through rich).
"""

from __future__ import annotations

import os
import queue
import stat
import threading
from typing import TextIO

from rich.color import ColorSystem
from rich.console import Console as RichConsole
from rich.style import Style

__all__ = ["QuietConsole", "TerminalConsole"]

MAX_WAITING = 20_000  # lines, some 2 MB, queued while nobody reads the terminal
MAX_WAITING_PIPE = 1_000_000  # lines, some 100 MB, queued for a reader that is slow
COLORS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


class QuietConsole:
    """Console that keeps lines and notices in memory; for libraries and tests.

    Args:
        limited: Whether it gets lines at the rate of a terminal.
    """

    def __init__(self, *, limited: bool = False) -> None:
        self._limited = limited
        self.lines: list[tuple[int, int, bytes]] = []
        self.notices: list[str] = []

    # the launcher passes whole lines only
    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:  # noqa: ARG002
        """Keep a line of a rank."""
        self.lines.append((rank, stream, text))

    def notice(self, text: str) -> None:
        """Keep a message of the launcher."""
        self.notices.append(text)

    def is_limited(self, stream: int) -> bool:  # noqa: ARG002 - both alike
        """Whether it gets lines at the rate of a terminal."""
        return self._limited


class TerminalConsole:
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
        self._lost = 0
        self._terminals = {
            stream for stream, file in self._streams.items() if not file.closed and file.isatty()
        }
        self._files = {stream for stream, file in self._streams.items() if _is_regular(file)}
        limit = MAX_WAITING if self._terminals else MAX_WAITING_PIPE
        self._queue: queue.Queue[tuple[int, str] | None] = queue.Queue(limit)
        self._thread = threading.Thread(target=self._show, name="braid-launch-console", daemon=True)
        self._thread.start()

    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:
        """Show a line of a rank; the line is dropped and counted if nobody reads the terminal.

        A single rank keeps its own line ends, so that progress bars move. Lines of several ranks
        all end with a newline.
        """
        shown = "\n" if self._prefixed else end.decode()
        self._put(stream, self._prefix(rank, stream) + text.decode(errors="replace") + shown)

    def notice(self, text: str) -> None:
        """Show a message of the launcher."""
        self._put(2, f"braid: {text}\n")

    def is_limited(self, stream: int) -> bool:
        """Whether the stream is a terminal."""
        return stream in self._terminals

    def close(self) -> None:
        """Show the queued lines and end the thread; waits for the terminal. Idempotent."""
        if not self._thread.is_alive():
            return
        if self._lost:
            self._queue.put(
                (2, f"braid: {self._lost:,} lines not shown: nobody read the output in time\n")
            )
        self._queue.put(None)
        self._thread.join()

    def __enter__(self) -> TerminalConsole:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _prefix(self, rank: int, stream: int) -> str:
        if not self._prefixed:
            return ""
        prefix = f"[rank {rank}]"
        if self._colored[stream]:
            style = Style(color=COLORS[rank % len(COLORS)])
            prefix = style.render(prefix, color_system=ColorSystem.STANDARD)
        return prefix + " "

    def _put(self, stream: int, text: str) -> None:
        try:
            self._queue.put((stream, text), block=stream in self._files)
        except queue.Full:
            self._lost += 1

    def _show(self) -> None:
        while (item := self._queue.get()) is not None:
            stream, text = item
            file = self._streams[stream]
            try:
                file.write(text)
                if self._queue.empty():
                    file.flush()
            except (OSError, ValueError):  # a closed pipe: `braid run ... | head`; logs go on
                continue


def _is_regular(file: TextIO) -> bool:
    """Return whether `file` is a file on a disk, which takes what is written without a reader."""
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except (OSError, ValueError):  # a stream in memory, or a closed one
        return False
