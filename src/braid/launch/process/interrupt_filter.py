"""Hides the tracebacks that ranks print after Ctrl-C.

Problem: Python answers SIGINT with a traceback, of forty lines during imports. N ranks print N of
them over the launcher's one error block. Ranks cannot simply ignore the signal, because some
programs save a checkpoint on SIGINT.

Idea: hold back the lines of a traceback until the line that names the error. A `KeyboardInterrupt`
is dropped; any other traceback is shown unchanged. Log files are written before this filter and
keep everything.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["InterruptFilter", "Line"]

BEGINS = re.compile(
    rb"(?:\[rank\d+\]: ?)?(?:Traceback \(most recent call last\)|Exception ignored )"
)
GOES_ON = re.compile(
    rb"(?:\[rank\d+\]:(?: |$))?(?:\s|$|During handling of the above |The above exception was )"
)
INTERRUPT = re.compile(rb"(?:\[rank\d+\]: ?)?KeyboardInterrupt(?::|$)")
MAX_HELD = 1000  # lines; a traceback has fewer, and longer output should be shown


class Line(NamedTuple):
    """A line of output of a rank.

    Attributes:
        text: The line without its end.
        end: Terminator of the line: a newline, a carriage return, or empty.
    """

    text: bytes
    end: bytes


class InterruptFilter:
    """Removes tracebacks of `KeyboardInterrupt` from the lines of one stderr stream."""

    def __init__(self) -> None:
        self._held: list[Line] = []

    def feed(self, line: Line) -> list[Line]:
        """Add `line` and return the lines that can be shown now."""
        begins = BEGINS.match(line.text) is not None
        if not begins and not self._held:
            return [line]
        self._held.append(line)
        if INTERRUPT.match(line.text):
            self._held = []
        elif (not begins and not GOES_ON.match(line.text)) or len(self._held) > MAX_HELD:
            return self.flush()
        return []

    def flush(self) -> list[Line]:
        """Return the held lines of an incomplete traceback."""
        held, self._held = self._held, []
        return held
