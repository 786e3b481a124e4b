"""Leaves the tracebacks of a Ctrl-C out of what is shown: N ranks that were told to stop have nothing to explain.

Problem: Python answers SIGINT with a traceback, of forty lines when it comes during imports, and N
ranks print N of them over the one block that says what happened. Ignoring the signal in the ranks
would take it from programs that save on it.

Idea: hold back what looks like a traceback until the line that names its error; a
`KeyboardInterrupt` is dropped, anything else is shown as it was. Logs do not come this way and keep
everything.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["InterruptFilter", "Line"]

BEGINS = re.compile(
    rb"(?:\[rank\d+\]: ?)?(?:Traceback \(most recent call last\)|Exception ignored )"
)
GOES_ON = re.compile(
    rb"(?:\[rank\d+\]: ?)?(?:\s|$|During handling of the above |The above exception was )"
)
INTERRUPT = re.compile(rb"(?:\[rank\d+\]: ?)?KeyboardInterrupt(?::|$)")
MAX_HELD = 1000  # lines; a traceback has fewer, and whatever is longer should be seen


class Line(NamedTuple):
    """A piece of output; `end` is what ended it: a newline, a carriage return, or nothing."""

    text: bytes
    end: bytes


class InterruptFilter:
    """Takes the lines of a stderr and gives back those to show."""

    def __init__(self) -> None:
        self._held: list[Line] = []

    def feed(self, line: Line) -> list[Line]:
        """What may be shown now that `line` has come."""
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
        """What is held: a traceback that has not come to its end."""
        held, self._held = self._held, []
        return held
