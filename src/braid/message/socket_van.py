"""A van over sockets; see `van`. (Signatures; the driver follows.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

from braid.clock import Clock
from braid.message.schema import Schema
from braid.message.van import Van, VanConfig
from braid.wire import Secret

__all__ = ["SocketVan"]

_Base = Van if TYPE_CHECKING else object


class SocketVan(_Base):
    """A `Van` between processes and hosts, over unix sockets and TCP.

    Args:
        node: Own name, such as "worker:3" or "launcher".
        schema: The messages, the same on all nodes.
        secret: The job's secret.
        run_id: The job.
        listen: Where others can `connect` to; only this node connects to others when empty.
        listen_anywhere: Allow an address that other hosts can reach.
        epoch: Membership epoch to begin with.
        config: Limits and times.
        clock: Must move by itself; the host's when None.

    Raises:
        ConfigError: The name, the run id or the address cannot be used.
    """

    def __init__(
        self,
        node: str,
        schema: Schema,
        *,
        secret: Secret,
        run_id: str,
        listen: str = "",
        listen_anywhere: bool = False,
        epoch: int = 0,
        config: VanConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why the last clients were turned away, newest last."""
        raise NotImplementedError
