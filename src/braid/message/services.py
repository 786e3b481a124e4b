"""Requests and replies over a van. (Signatures; the code follows.)"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from braid.message.schema import Message
from braid.message.van import Delivery, Van
from braid.wire import Buffer

__all__ = ["Handler", "Reply", "Service"]


class Reply:
    """An answer with buffers: `Reply(message, buffers=())`."""


Handler = Callable[[Delivery], "Message | Reply | None"]


class Service:
    """Routes what a van receives by type to handlers, and sends what they return as the answer.

    Also calls other services: `call` works with or without the thread of `start`. Handles the same message id of the same
    sender once, and repeats its answer. `PeerLost` is routed like a message.
    """

    def __init__(self, van: Van, handlers: Mapping[type[Message], Handler] | None = None) -> None:
        raise NotImplementedError

    def call(
        self,
        to: str,
        message: Message,
        timeout_s: float | None = None,
        *,
        buffers: Sequence[Buffer] = (),
        priority: int = 0,
        retry_s: float | None = None,
    ) -> Delivery:
        """Send a request and wait for its answer; sends it again, under the same id, every `retry_s`.

        Raises:
            CommTimeout, PeerLostError: As named.
            CommError: The handler raised; the text says what.
        """
        raise NotImplementedError

    def serve(self, timeout_s: float | None = None) -> bool:
        """Handle the next message; False if none came."""
        raise NotImplementedError

    def start(self) -> None:
        """Serve in a thread `braid-message-<node>-service` until `close`."""
        raise NotImplementedError

    def close(self) -> None:
        """End the thread; the van stays open."""
        raise NotImplementedError
