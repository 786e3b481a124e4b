r"""The stream between launcher and agent: the agent's first line, then the frames of a van.

Problem: a remote shell (ssh, `ip netns exec`, a batch system) offers only stdin and stdout, and may
print a greeting into the stream first.

Idea: the agent begins with a line that nothing else prints and that contains its version. The text
before the line is kept for the error message; the bytes after it belong to the van.

    agent -> launcher    noise ... \0braid-agent 0.1.0\n frame frame ...
    launcher -> agent    frame frame ...
"""

from __future__ import annotations

from contextlib import suppress

from braid._version import __version__
from braid.errors import PeerLostError
from braid.launch.cluster.agent_messages import FromAgent, ToAgent, priority_of
from braid.runtime.message import PipeVan, VanConfig

__all__ = ["MESSAGES_PER_TURN", "AgentChannel", "FirstLine", "first_line", "van_config"]

MESSAGES_PER_TURN = 64  # number of messages that are processed before signals and ranks
BEAT_S = 5.0
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


def van_config(lost_after_s: float) -> VanConfig:
    """Return the configuration for the van of a launcher or an agent.

    A launcher or agent that blocks would miss signals. The send queue is therefore unbounded, and
    the agent pauses ranks that print faster than the network carries.

    Args:
        lost_after_s: Seconds of silence after which the peer counts as lost.
    """
    return VanConfig(
        heartbeat_s=BEAT_S,
        lost_after_s=lost_after_s,
        max_queue_bytes=1 << 50,
        max_queue_messages=1 << 30,
    )


class AgentChannel:
    """Sends messages to one peer; messages to a lost peer are dropped.

    Args:
        van: Van that carries the messages, and reports the loss of the peer; not owned.
        peer: Name of the peer.
    """

    def __init__(self, van: PipeVan, peer: str) -> None:
        self._van = van
        self._peer = peer

    @property
    def queued_bytes(self) -> int:
        """Number of bytes in the send queue."""
        return self._van.statistics(self._peer).queued_bytes

    def send(self, message: ToAgent | FromAgent, *buffers: bytes) -> None:
        """Queue a message and its buffers; never blocks."""
        with suppress(PeerLostError):
            self._van.try_send(self._peer, message, buffers=buffers, priority=priority_of(message))
