"""Handle on a message, which `Van.send` returns."""

from __future__ import annotations

from collections.abc import Callable

from braid.message.protocol.send_queue import Outgoing

__all__ = ["Sending"]


class Sending:
    """A message on its way out, as `Van.send` returns it."""

    __slots__ = ("_outgoing", "_wait")

    def __init__(self, outgoing: Outgoing, wait: Callable[[Outgoing, float | None], None]) -> None:
        self._outgoing = outgoing
        self._wait = wait

    @property
    def id(self) -> int:
        """Number of the message; pass it as `message_id` to send the same message again."""
        return self._outgoing.head.id

    @property
    def life(self) -> int:
        """Incarnation of the peer to which the message was sent; 0 if its Hello had not come."""
        return self._outgoing.life

    @property
    def done(self) -> bool:
        """Whether the van is finished with the message: its buffers may be reused."""
        return self._outgoing.done

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the van has handed all of the message to the network.

        Its buffers may be reused then.

        Args:
            timeout_s: Seconds to wait; when None, the message's own deadline, or the van's
                `timeout_s` if it has none.

        Raises:
            CommTimeout: The deadline passed; `done` says whether the buffers are still in use.
            PeerLostError: The link broke before.
            StaleError: The van began a later epoch before.
        """
        self._wait(self._outgoing, timeout_s)

    def __repr__(self) -> str:
        state = "waiting"
        if self._outgoing.done:
            state = "sent" if self._outgoing.error is None else "failed"
        return f"<Sending {self._outgoing.head.name} #{self.id}: {state}>"
