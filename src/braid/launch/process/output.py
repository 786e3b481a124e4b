r"""Writes the output of ranks to complete log files and to a readable console.

Problem: N processes that share a terminal cut each other's lines. A rank that repeats a warning
hides all other ranks, and progress bars write `\r` a hundred times a second. A terminal that is not
read blocks the training.

Idea: each rank writes to two pipes, which the launcher drains continuously. The log gets every
byte. The console gets whole lines prefixed with the rank, one state of a progress bar every half
second, and tracebacks of several ranks once (see `traceback_filter`).

A terminal gets them at a limited rate: omitted lines are counted, and the last ones of a rank are
always shown. A file or a pipe gets all lines.
"""

from __future__ import annotations

import os
import re
from collections import deque
from pathlib import Path
from typing import BinaryIO, Protocol

from braid.launch.process.interrupt_filter import InterruptFilter, Line
from braid.launch.process.traceback_filter import SharedTracebacks, TracebackFilter
from braid.runtime.last_words import FULL

__all__ = ["Console", "LineBudget", "LineSplitter", "RankOutput"]

LINE_END = re.compile(
    rb"\r?\n|\r(?=[^\n])"
)  # a carriage return at the very end may belong to a newline
MAX_PARTIAL_BYTES = 64 << 10  # a longer line is passed on in pieces
PROGRESS_NS = 500_000_000
LINES_PER_S = 200
BURST_LINES = 1000
LAST_LINES = 10  # of a rank's output that are shown whatever the rate
TAIL_BYTES = 64 << 10  # of stderr: more than the longest traceback that is worth reading


class Console(Protocol):
    """Destination of rank output and launcher messages."""

    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:
        """Show a line that a rank has written.

        Args:
            rank: Rank that wrote the line.
            stream: 1 for stdout, 2 for stderr.
            text: The line without its end.
            end: Terminator of the line; used where the console can show partial lines.
        """

    def notice(self, text: str) -> None:
        """Show a message of the launcher."""

    def is_limited(self, stream: int) -> bool:
        """Return whether a stream (1 or 2) should get few lines per second, as for a terminal."""


class LineSplitter:
    """Splits a stream of bytes, which arrives in arbitrary pieces, into lines.

    A carriage return also ends a line (a state of a progress bar), unless a newline follows.
    """

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, chunk: bytes) -> list[Line]:
        """Add `chunk` and return the lines that are now complete."""
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
        """Return the rest of the stream as a line without terminator."""
        rest, self._partial = self._partial, b""
        return [Line(rest, b"")] if rest else []


class LineBudget:
    """Limits the rate of lines with a token bucket.

    Args:
        per_s: Number of lines per second in the long run.
        burst: Number of lines that may be shown without a pause.
    """

    def __init__(self, per_s: int = LINES_PER_S, burst: int = BURST_LINES) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens = float(burst)
        self._then_ns = 0

    def allow(self, now_ns: int) -> bool:
        """Return whether one more line may be shown now."""
        elapsed_s = (now_ns - self._then_ns) / 1e9 if self._then_ns else 0.0
        self._tokens = min(self._burst, self._tokens + elapsed_s * self._per_s)
        self._then_ns = now_ns
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class RankOutput:
    """Writes the output of one rank to its log and the console, and keeps the tail of its stderr.

    Args:
        rank: Rank that writes the output.
        log_path: Path of the log file; an existing file is truncated.
        console: Console that shows the lines.
        budget: Rate limit of the console's limited streams; None shows everything.
        tracebacks: Tracebacks of all ranks; equal ones are shown once. None shows all.

    Attributes:
        log_problem: Why the log is incomplete; empty if it is complete.
        num_omitted: Number of lines that the console did not get.
        stderr_ns: Time at which the rank last wrote to stderr; 0 if it has not.
    """

    def __init__(
        self,
        rank: int,
        log_path: Path,
        console: Console,
        budget: LineBudget | None,
        tracebacks: SharedTracebacks | None = None,
    ) -> None:
        self.rank = rank
        self.log_path = log_path
        self.log_problem = ""
        self.num_omitted = 0
        self.stderr_ns = 0
        self._console = console
        self._log = self._opened_log()
        self._budget = budget
        self._splitters = {1: LineSplitter(), 2: LineSplitter()}
        self._progress_ns = {1: 0, 2: 0}
        self._stderr_tail = b""
        self._last: deque[tuple[int, Line]] = deque(maxlen=LAST_LINES)
        self._num_dropped = 0
        self._interrupt: InterruptFilter | None = None
        self._tracebacks: TracebackFilter | None = None
        if tracebacks is not None:
            self._tracebacks = TracebackFilter(rank, str(log_path), tracebacks)

    @property
    def stderr_tail(self) -> str:
        """The last 64 KiB of stderr."""
        return self._stderr_tail.decode(errors="replace")

    def feed(self, stream: int, chunk: bytes, now_ns: int) -> None:
        """Process the bytes `chunk` that the rank wrote to stdout (1) or stderr (2)."""
        if stream == 2:
            self.stderr_ns = now_ns
            self._stderr_tail = (self._stderr_tail + chunk)[-TAIL_BYTES:]
        self._accept(stream, self._splitters[stream].feed(chunk), now_ns)

    def hide_interrupts(self) -> None:
        """Hide tracebacks of `KeyboardInterrupt` from now on. Idempotent."""
        if self._interrupt is None:
            self._interrupt = InterruptFilter()

    def close(self, now_ns: int) -> None:
        """Show and log the remaining output, and close the log. Idempotent."""
        if self._log.closed:
            return
        for stream, splitter in self._splitters.items():
            self._accept(stream, splitter.flush(), now_ns)
        if self._interrupt is not None:
            self._show(2, self._without_tracebacks(self._interrupt.flush()), now_ns)
        if self._tracebacks is not None:
            self._show(2, self._tracebacks.flush(), now_ns)
        self._show_dropped(LAST_LINES)
        self._log.close()

    def _opened_log(self) -> BinaryIO:
        try:
            return self.log_path.open("wb", buffering=0)
        except OSError as exc:
            if exc.errno not in FULL:
                raise
            self._end_log(exc)
            return Path(os.devnull).open("wb", buffering=0)

    def _end_log(self, exc: OSError) -> None:
        """Continue without a log, as a full disk does not end the training."""
        self.log_problem = f"{self.log_path} ends early: {exc.strerror}"
        self._console.notice(self.log_problem)

    def _accept(self, stream: int, lines: list[Line], now_ns: int) -> None:
        if not lines:
            return
        self._write(b"".join(text + end for text, end in lines))
        if stream == 2 and self._interrupt is not None:
            lines = [shown for line in lines for shown in self._interrupt.feed(line)]
        if stream == 2:
            lines = self._without_tracebacks(lines)
        self._show(stream, lines, now_ns)

    def _without_tracebacks(self, lines: list[Line]) -> list[Line]:
        """Return `lines` of stderr without repeated tracebacks."""
        if self._tracebacks is None:
            return lines
        return [shown for line in lines for shown in self._tracebacks.feed(line)]

    def _show(self, stream: int, lines: list[Line], now_ns: int) -> None:
        for text, end in lines:
            if end == b"\r" and self._budget is not None:
                if now_ns - self._progress_ns[stream] < PROGRESS_NS or not text:
                    continue
                self._progress_ns[stream] = now_ns
            limited = self._budget is not None and self._console.is_limited(stream)
            if not limited or (self._budget is not None and self._budget.allow(now_ns)):
                self._show_dropped()
                self._console.line(self.rank, stream, text, end)
            else:
                self._num_dropped += 1
                self._last.append((stream, Line(text, end)))

    def _show_dropped(self, num_shown: int = 0) -> None:
        """Show the last `num_shown` dropped lines, and the number of the other dropped lines."""
        shown = list(self._last)[-num_shown:] if num_shown else []
        omitted = self._num_dropped - len(shown)
        self._last.clear()
        self._num_dropped = 0
        if omitted:
            self.num_omitted += omitted
            plural = "s" if omitted > 1 else ""
            note = f"... {omitted:,} line{plural} not shown, see {self.log_path}"
            self._console.line(self.rank, 2, note.encode())
        for stream, (text, end) in shown:
            self._console.line(self.rank, stream, text, end)

    def _write(self, data: bytes) -> None:
        if self.log_problem:
            return
        try:
            while data:
                data = data[self._log.write(data) :]
        except OSError as exc:
            self._end_log(exc)
