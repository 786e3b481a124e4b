"""Shows each traceback of several ranks once, and tracebacks of lost peers as one line.

Problem: when a rank fails, every other rank prints thirty lines of autograd and of braid that lead
to "rank 1 raised ValueError". An error on all ranks is printed N times over. Both push the lines
that matter out of sight.

Idea: hold back the lines of a traceback until the line that names the error. The traceback of a
`PeerLostError` becomes that line. A traceback that another rank has printed is hidden once, with
the lines that followed it there, and the launcher names the ranks in one line at the end. Anything
else is shown unchanged. Log files are written before this filter and keep everything.
"""

from __future__ import annotations

import re

from braid.launch.process.interrupt_filter import GOES_ON, MAX_HELD, Line

__all__ = ["SharedTracebacks", "TracebackFilter"]

PREFIX = re.compile(rb"^\[rank\d+\]: ?")  # torch's
BEGINS = re.compile(rb"(?:\[rank\d+\]: ?)?Traceback \(most recent call last\)")
BETWEEN = re.compile(
    rb"(?:\[rank\d+\]:(?: |$))?(?:$|During handling of the above |The above exception was )"
)
LOST_PEER = re.compile(rb"(?:\[rank\d+\]: ?)?(?:braid\.errors\.)?PeerLostError: ")
MAX_NAMED = 80  # characters of an error with hidden copies; the whole error is shown above
MAX_DETAILS = 40  # lines of a message, such as a table of ranks


class _Shown:
    """A traceback that a rank has shown.

    Attributes:
        rank: First rank that printed it.
        details: Lines that followed it there.
        hidden_on: Ranks that printed a hidden copy.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.details: list[bytes] = []
        self.hidden_on: list[int] = []


class SharedTracebacks:
    """Tracebacks that the ranks of a run have printed."""

    def __init__(self) -> None:
        self._by_text: dict[bytes, _Shown] = {}

    def register(self, rank: int, text: bytes) -> tuple[_Shown, bool]:
        """Record a traceback; return its record, and whether to hide it as a repeated one."""
        shown = self._by_text.setdefault(text, _Shown(rank))
        hides = shown.rank != rank and rank not in shown.hidden_on
        if hides:
            shown.hidden_on.append(rank)
        return shown, hides

    def hidden(self) -> dict[tuple[int, tuple[int, ...]], list[str]]:
        """Return the errors of hidden tracebacks by (rank that showed it, ranks that hid it)."""
        errors: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        for text, shown in self._by_text.items():
            if shown.hidden_on:
                error = text.rpartition(b"\n")[2].decode(errors="replace")
                error = error if len(error) <= MAX_NAMED else f"{error[:MAX_NAMED]}..."
                ranks = (shown.rank, tuple(sorted(shown.hidden_on)))
                errors.setdefault(ranks, []).append(error)
        return errors


class TracebackFilter:
    """Shortens tracebacks in the stderr of one rank; hides tracebacks that another rank showed.

    Args:
        rank: Rank that writes the lines.
        log_path: Path of the log, where whole tracebacks are.
        shared: Tracebacks of all ranks of the run.
    """

    def __init__(self, rank: int, log_path: str, shared: SharedTracebacks) -> None:
        self._rank = rank
        self._log_path = log_path
        self._shared = shared
        self._held: list[Line] = []
        self._between: list[Line] = []  # lines after a hidden traceback that may belong to it
        self._last: _Shown | None = None  # the last traceback; its details may follow
        self._hidden = False
        self._num_details = 0

    def feed(self, line: Line) -> list[Line]:
        """Add `line` and return the lines that can be shown now."""
        if BEGINS.match(line.text):
            earlier, self._held = self._held, [line]
            return earlier
        if not self._held:
            return self._after(line)
        self._held.append(line)
        if GOES_ON.match(line.text):
            return self.flush() if len(self._held) > MAX_HELD else []
        held, self._held = self._held, []
        return self._traceback(held)

    def flush(self) -> list[Line]:
        """Return the held lines, of an incomplete traceback or after a hidden one."""
        lines = [*self._between, *self._held]
        self._between, self._held = [], []
        return lines

    def _traceback(self, lines: list[Line]) -> list[Line]:
        """Return the lines of a complete traceback that are shown."""
        between, self._between = self._between, []
        error = lines[-1]
        if LOST_PEER.match(error.text):
            self._last = None
            note = f"  (traceback in {self._log_path})".encode()
            return [*between, Line(error.text + note, error.end)]
        text = b"\n".join(PREFIX.sub(b"", line.text) for line in lines)
        self._last, self._hidden = self._shared.register(self._rank, text)
        self._num_details = 0
        return [] if self._hidden else [*between, *lines]

    def _after(self, line: Line) -> list[Line]:
        """Return the lines that are shown for a line outside of tracebacks."""
        text = PREFIX.sub(b"", line.text)
        if self._last is not None and self._num_details < MAX_DETAILS:
            if not self._hidden:
                if self._rank == self._last.rank:
                    self._last.details.append(text)
                    self._num_details += 1
                return [line]
            details = self._last.details
            if self._num_details < len(details) and details[self._num_details] == text:
                self._num_details += 1
                return []
            if BETWEEN.match(line.text):
                self._between.append(line)
                return []
        self._last = None
        return [*self.flush(), line]
