"""The user's terminal, written to by a thread of its own so that a terminal that is not read stops nobody.

`[rank 1]` stands before each line when there are several ranks, coloured on a terminal and plain
elsewhere; `NO_COLOR` and `TERM=dumb` are honoured (by rich, which is asked for the style only).
"""

from __future__ import annotations

import queue
import threading
from typing import TextIO

from rich.color import ColorSystem
from rich.console import Console as RichConsole
from rich.style import Style

__all__ = ["QuietConsole", "TerminalConsole"]

MAX_WAITING = 20_000  # lines; some 2 MB of a terminal that is not read
COLORS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")


class QuietConsole:
    """Keeps what would be shown; for libraries and tests."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, int, bytes]] = []
        self.notices: list[str] = []

    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:  # noqa: ARG002 - whole lines only
        """Keep a line of a rank."""
        self.lines.append((rank, stream, text))

    def notice(self, text: str) -> None:
        """Keep a message of the launcher."""
        self.notices.append(text)


class TerminalConsole:
    """Shows lines on two text streams.

    Args:
        out: For what ranks write to stdout.
        err: For what they write to stderr, and for notices.
        prefixed: Whether `[rank r]` stands before each line.
    """

    def __init__(self, out: TextIO, err: TextIO, *, prefixed: bool) -> None:
        self._streams = {1: out, 2: err}
        self._colored = {
            stream: (rich := RichConsole(file=file)).color_system is not None and not rich.no_color
            for stream, file in self._streams.items()
        }
        self._prefixed = prefixed
        self._lost = 0
        self._queue: queue.Queue[tuple[int, str] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._show, name="braid-launch-console", daemon=True)
        self._thread.start()

    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:
        """Show a line of a rank; dropped, and counted, while nobody reads the terminal.

        A rank alone keeps its own line ends, so that progress bars move; several ranks get a line
        each.
        """
        shown = "\n" if self._prefixed else end.decode()
        self._put(stream, self._prefix(rank, stream) + text.decode(errors="replace") + shown)

    def notice(self, text: str) -> None:
        """Show a message of the launcher."""
        self._put(2, f"braid: {text}\n")

    def close(self) -> None:
        """Show what waits and end the thread; waits for the terminal's reader, as any program does. Idempotent."""
        if not self._thread.is_alive():
            return
        if self._lost:
            self._queue.put(
                (2, f"braid: {self._lost:,} lines not shown: nobody read the terminal\n")
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
            self._queue.put_nowait((stream, text))
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
