r"""Finds the begin of an agent's frames in the output of a remote shell.

Problem: a remote shell (ssh, `ip netns exec`, a batch system) offers only stdin and stdout, and may
print a greeting into the stream first.

Idea: the agent begins with a line that nothing else prints and that contains its version. The text
before the line is kept for the error message; the bytes after it belong to the van.

    agent -> launcher    noise ... \0braid-agent 0.1.0\n frame frame ...
    launcher -> agent    frame frame ...
"""

from __future__ import annotations

from braid._version import __version__

__all__ = ["FirstLine", "first_line"]

MARK = b"\0braid-agent "
MAX_LINE = 64  # a version is shorter
MAX_NOISE = 64 << 10


def first_line() -> bytes:
    """Return the line that an agent writes before its first frame."""
    return MARK + __version__.encode() + b"\n"


class FirstLine:
    """Searches a stream for the first line of an agent.

    Attributes:
        version: Version of the agent's braid; empty until the line has arrived.
        noise: Bytes before the line.
        rest: Bytes after the line.
    """

    def __init__(self) -> None:
        self.version = ""
        self.noise = b""
        self.rest = b""

    def feed(self, chunk: bytes) -> bool:
        """Add bytes of the stream; return whether the line has arrived."""
        self.noise += chunk
        before, mark, after = self.noise.partition(MARK)
        line, newline, rest = after.partition(b"\n")
        if mark and newline and len(line) <= MAX_LINE:
            self.noise, self.version, self.rest = before, line.decode(errors="replace"), rest
        elif len(self.noise) > MAX_NOISE + MAX_LINE:
            self.noise = self.noise[-MAX_LINE:]
        return bool(self.version)
