"""Van over sockets: between the processes of a host, and between hosts.

Problem: any process that can reach a port can connect to it. Idea: a connection becomes a link when
the handshake of `wire` has proven the identity of each end to the other; before that, nothing is
parsed. Large buffers between processes of one host use shared memory, see `shared_memory`.
"""

from __future__ import annotations

from braid.errors import RendezvousError
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.message.protocol.schema import Schema
from braid.runtime.message.protocol.vocabulary import VanConfig, split_node
from braid.runtime.message.vans.shared_memory import SharedStream
from braid.runtime.message.vans.stream_van import FRAME_LIMITS, StreamVan, node_of
from braid.runtime.wire import Connection, Identity, Listener, Secret
from braid.runtime.wire import connect as connect_wire

__all__ = ["SocketVan"]


class SocketVan(StreamVan):
    """Van (typed messages between named nodes) over unix sockets and TCP.

    Args:
        node: Name of this node, such as "worker:3" or "launcher".
        schema: Messages, the same on all nodes.
        secret: The job's secret.
        run_id: Name of the job.
        listen: Address to which other nodes can `connect`, see `runtime.wire.address`; empty if
            only this node connects to others.
        listen_anywhere: Whether to allow an address that other hosts can reach.
        epoch: Membership epoch to begin with.
        config: Limits and times.
        clock: Clock of deadlines, which must advance by itself; None for the host's clock.

    Raises:
        ConfigError: The name, the run id or the address cannot be used.

    On failure: see `StreamVan`.
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
        clock = clock or MonotonicClock()
        identity = Identity(run_id, *split_node(node), epoch)
        listener: Listener | None = None
        if listen:
            listener = Listener(
                listen,
                secret,
                identity,
                listen_anywhere=listen_anywhere,
                limits=FRAME_LIMITS,
                clock=clock,
            )
        super().__init__(node, schema, listener=listener, epoch=epoch, config=config, clock=clock)
        self._secret = secret
        self._identity = identity

    @property
    def address(self) -> str:
        """Address of the listener, with the real port; empty if the van does not listen."""
        return "" if self._listener is None else self._listener.address

    @property
    def refusals(self) -> tuple[str, ...]:
        """Reasons why the last clients were refused, newest last."""
        return () if self._listener is None else self._listener.refusals

    def connect(self, to: str, address: str = "", *, timeout_s: float | None = None) -> None:
        """Connect to a node and wait for its Hello; see `Van.connect`."""
        split_node(to)
        with self._guard:
            self._check_open()
            if to in self._state.peers:
                return
        deadline_ns = self._deadline_ns(timeout_s)
        connection = connect_wire(
            address,
            self._secret,
            self._identity,
            timeout_s=self._state.config.timeout_s if timeout_s is None else timeout_s,
            limits=FRAME_LIMITS,
            clock=self.clock,
        )
        peer = node_of(connection.peer)
        if peer != to:
            connection.close()
            msg = (
                f"{peer} answered at {address}, not {to}: connect to the address that {to} "
                "listens on"
            )
            raise RendezvousError(msg)
        with self._guard:
            link = self._adopt(self._stream(connection), to)
            while to not in self._state.peers:
                if link not in self._wires or not self._wait(deadline_ns):
                    self._state.link_lost(link, "it did not greet")
                    self._act()
                    msg = (
                        f"{to} at {address} accepted the connection of {self.node}, then "
                        "closed it or was silent: look for the first error of that process"
                    )
                    raise RendezvousError(msg)

    def _stream(self, connection: Connection) -> SharedStream:
        return SharedStream(connection, enabled=self._state.config.shared_memory)
