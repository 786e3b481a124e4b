r"""How an agent that was started through another program begins to speak: with a line that nothing else prints.

Problem: what reaches another host (ssh, `ip netns exec`, a batch system) offers stdin and stdout
and nothing else, and the far shell may print a greeting of its own into the stream before braid
speaks. Idea: the agent begins with a line that nothing else prints, with its version in it; what
comes before is kept for the error message, what comes after belongs to the van that then takes the
pipes over.

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
    """What an agent writes before its first frame."""
    return MARK + __version__.encode() + b"\n"


class FirstLine:
    """Looks for the first line of an agent.

    Attributes:
        version: The agent's braid, once its line has come.
        noise: What came before the line.
        rest: What came after it.
    """

    def __init__(self) -> None:
        self.version = ""
        self.noise = b""
        self.rest = b""

    def feed(self, chunk: bytes) -> bool:
        """Take what has arrived; whether the line is there."""
        self.noise += chunk
        before, mark, after = self.noise.partition(MARK)
        line, newline, rest = after.partition(b"\n")
        if mark and newline and len(line) <= MAX_LINE:
            self.noise, self.version, self.rest = before, line.decode(errors="replace"), rest
        elif len(self.noise) > MAX_NOISE + MAX_LINE:
            self.noise = self.noise[-MAX_LINE:]
        return bool(self.version)
