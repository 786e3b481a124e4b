"""Sends messages to one peer of a van: the launcher, or an agent."""

from __future__ import annotations

from contextlib import suppress

from braid.errors import PeerLostError
from braid.launch.cluster.agent_messages import FromAgent, ToAgent, priority_of
from braid.runtime.message import PipeVan, VanConfig

__all__ = ["MESSAGES_PER_TURN", "AgentChannel", "van_config"]

MESSAGES_PER_TURN = 64  # number of messages that are processed before signals and ranks
BEAT_S = 5.0


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
