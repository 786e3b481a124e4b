r"""What ranks print: complete in their log files, readable on the console.

Problem: N processes that share a terminal cut each other's lines, a rank in a loop of warnings
hides all the others, progress bars write `\r` a hundred times a second, and a terminal that is not
read blocks the training.

Idea: each rank writes to two pipes that the launcher drains at once. The log gets every byte, line
by line. The console gets whole lines with the rank before them, at most so many a second, of
progress bars one state every half second, and what is left out is counted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import BinaryIO, Protocol

from braid.launch.process.interrupt_filter import InterruptFilter, Line

__all__ = ["Console", "LineBudget", "LineSplitter", "RankOutput"]

LINE_END = re.compile(
    rb"\r?\n|\r(?=[^\n])"
)  # a carriage return at the very end may belong to a newline
MAX_PARTIAL_BYTES = 64 << 10  # a "line" longer than this is passed on in pieces
PROGRESS_NS = 500_000_000
LINES_PER_S = 200
BURST_LINES = 1000
TAIL_BYTES = 64 << 10  # of stderr; the longest traceback that is worth reading


class Console(Protocol):
    """Where the user looks."""

    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:
        """Show a line that `rank` wrote to stdout (1) or stderr (2), and `end` where that is possible."""
        ...

    def notice(self, text: str) -> None:
        """Show a message of the launcher."""
        ...


class LineSplitter:
    """Cuts a stream of bytes into lines, whatever pieces it arrives in.

    A carriage return ends a state of a progress bar, unless a newline follows.
    """

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, chunk: bytes) -> list[Line]:
        """The lines that `chunk` completes."""
        data = self._partial + chunk
        lines: list[Line] = []
        start = 0
        for end in LINE_END.finditer(data):
            lines.append(Line(data[start : end.start()], end[0]))
            start = end.end()
        self._partial = data[start:]
        if len(self._partial) > MAX_PARTIAL_BYTES:
            lines += self.flush()
        return lines

    def flush(self) -> list[Line]:
        """What is left, as a line without end."""
        rest, self._partial = self._partial, b""
        return [Line(rest, b"")] if rest else []


class LineBudget:
    """A token bucket: `burst` lines at once, then `per_s` a second."""

    def __init__(self, per_s: int = LINES_PER_S, burst: int = BURST_LINES) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens = float(burst)
        self._then_ns = 0

    def take(self, now_ns: int) -> bool:
        """Whether one more line may be shown now."""
        elapsed_s = (now_ns - self._then_ns) / 1e9 if self._then_ns else 0.0
        self._tokens = min(self._burst, self._tokens + elapsed_s * self._per_s)
        self._then_ns = now_ns
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class RankOutput:
    """The output of one rank: to its log, to the console, and its tail for the verdict.

    Args:
        rank: Its rank.
        log_path: The log file; made new.
        console: Where lines are shown.
        budget: Limits what is shown of lines and progress bars; None shows everything.
    """

    def __init__(
        self, rank: int, log_path: Path, console: Console, budget: LineBudget | None
    ) -> None:
        self.rank = rank
        self.log_path = log_path
        self.log_problem = ""  # why the log is not complete
        self._log: BinaryIO = log_path.open("wb", buffering=0)
        self._console = console
        self._budget = budget
        self._splitters = {1: LineSplitter(), 2: LineSplitter()}
        self._progress_ns = {1: 0, 2: 0}
        self._stderr_tail = b""
        self._dropped = 0
        self._interrupt: InterruptFilter | None = None

    @property
    def stderr_tail(self) -> str:
        """The last 64 KiB of stderr."""
        return self._stderr_tail.decode(errors="replace")

    def feed(self, stream: int, chunk: bytes, now_ns: int) -> None:
        """Take what the rank wrote to stdout (1) or stderr (2)."""
        if stream == 2:
            self._stderr_tail = (self._stderr_tail + chunk)[-TAIL_BYTES:]
        self._take(stream, self._splitters[stream].feed(chunk), now_ns)

    def hide_interrupts(self) -> None:
        """Show no traceback of a `KeyboardInterrupt` from now on: it was the launcher that interrupted. Idempotent."""
        if self._interrupt is None:
            self._interrupt = InterruptFilter()

    def close(self, now_ns: int) -> None:
        """Show and log what is left, and close the log. Idempotent."""
        if self._log.closed:
            return
        for stream, splitter in self._splitters.items():
            self._take(stream, splitter.flush(), now_ns)
        if self._interrupt is not None:
            self._show(2, self._interrupt.flush(), now_ns)
        self._tell_dropped()
        self._log.close()

    def _take(self, stream: int, lines: list[Line], now_ns: int) -> None:
        if not lines:
            return
        self._write(b"".join(text + end for text, end in lines))
        if stream == 2 and self._interrupt is not None:
            lines = [shown for line in lines for shown in self._interrupt.feed(line)]
        self._show(stream, lines, now_ns)

    def _show(self, stream: int, lines: list[Line], now_ns: int) -> None:
        for text, end in lines:
            if end == b"\r" and self._budget is not None:
                if now_ns - self._progress_ns[stream] < PROGRESS_NS or not text:
                    continue
                self._progress_ns[stream] = now_ns
            if self._budget is None or self._budget.take(now_ns):
                self._tell_dropped()
                self._console.line(self.rank, stream, text, end)
            else:
                self._dropped += 1

    def _tell_dropped(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            plural = "s" if dropped > 1 else ""
            note = f"... {dropped:,} line{plural} not shown, see {self.log_path}"
            self._console.line(self.rank, 2, note.encode())

    def _write(self, data: bytes) -> None:
        if self.log_problem:
            return
        try:
            while data:
                data = data[self._log.write(data) :]
        except OSError as exc:  # a full disk must not end the training
            self.log_problem = f"{self.log_path} ends early: {exc.strerror}"
            self._console.notice(self.log_problem)
