"""What one end of a van says to the other: into nothing when that is gone, which the van tells by itself."""

from __future__ import annotations

from contextlib import suppress

from braid.errors import PeerLostError
from braid.launch.cluster.agent_messages import FromAgent, ToAgent, priority_of
from braid.message import PipeVan, VanConfig

__all__ = ["MESSAGES_PER_TURN", "AgentChannel", "van_config"]

MESSAGES_PER_TURN = 64  # before signals and ranks have their turn
BEAT_S = 5.0


def van_config(lost_after_s: float) -> VanConfig:
    """For the van of a launcher or an agent.

    Neither may wait for the other: it would hear no signals. So the queue has no end, and who fills
    it is paused instead: ranks that print.
    """
    return VanConfig(
        heartbeat_s=BEAT_S,
        lost_after_s=lost_after_s,
        max_queue_bytes=1 << 50,
        max_queue_messages=1 << 30,
    )


class AgentChannel:
    """One peer of a van.

    Args:
        van: Carries the messages; not owned.
        peer: Who is at the other end.
    """

    def __init__(self, van: PipeVan, peer: str) -> None:
        self._van = van
        self._peer = peer

    @property
    def queued_bytes(self) -> int:
        """What waits to be sent."""
        return self._van.statistics(self._peer).queued_bytes

    def send(self, message: ToAgent | FromAgent, *buffers: bytes) -> None:
        """Send a message as soon as there is room."""
        with suppress(PeerLostError):
            self._van.try_send(self._peer, message, buffers=buffers, priority=priority_of(message))
