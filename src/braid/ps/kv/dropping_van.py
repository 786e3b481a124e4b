"""A van that loses messages on purpose, for tests of programs.

Source: PS_DROP_MSG of PS-Lite.
"""

from __future__ import annotations

import random

from braid.errors import ConfigError
from braid.runtime.message import Delivery, PeerLost, Schema, SocketVan, VanConfig
from braid.runtime.wire import Secret

__all__ = ["DroppingVan"]


class DroppingVan(SocketVan):
    """A `SocketVan` that drops some of the messages that arrive; see there.

    Args:
        node: Name of this node.
        schema: Messages.
        drop: Share of the messages to drop, 0 to 1 (exclusive).
        seed: Seed of the choice.
        secret: The job's secret.
        run_id: Name of the job.
        listen: Address to listen on.
        listen_anywhere: Allow an address that other hosts can reach.
        config: Limits and times.

    Attributes:
        num_dropped: Number of messages that were dropped.
    """

    def __init__(
        self,
        node: str,
        schema: Schema,
        *,
        drop: float,
        seed: int = 0,
        secret: Secret,
        run_id: str,
        listen: str = "",
        listen_anywhere: bool = False,
        config: VanConfig | None = None,
    ) -> None:
        if not 0 <= drop < 1:
            msg = f"the share of messages to drop is 0 to 1, got {drop}"
            raise ConfigError(msg)
        self._drop = drop
        self._random = random.Random(f"{seed} {node}")
        self.num_dropped = 0
        super().__init__(
            node,
            schema,
            secret=secret,
            run_id=run_id,
            listen=listen,
            listen_anywhere=listen_anywhere,
            config=config,
        )

    def _next_delivery(self) -> Delivery | None:
        """Return the next message that is not dropped; notices of losses are not."""
        while (delivery := super()._next_delivery()) is not None:
            lost = isinstance(delivery.message, PeerLost)
            if lost or self._random.random() >= self._drop:
                return delivery
            self.num_dropped += 1
        return None
