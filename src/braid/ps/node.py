"""`join`: become a server or a worker of a parameter server.

    with ps.join(braid.init(), servers=2) as node:       # the first ranks are servers
        weights = node.dense("weights", torch.zeros(64, 10), partial(torch.optim.SGD, lr=0.5))
        if node.is_server:
            node.serve()                                 # until all workers have left
        else:
            for _ in range(100):
                w = weights.pull()
                ...
                weights.push(grad)

All ranks declare the same tables. The group of all ranks carries addresses and a secret only.

Source: M. Li et al., Parameter Server, OSDI 2014, section 4.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from braid.comm import Group
from braid.errors import CommError, ConfigError, PeerLostError
from braid.message import Delivery, Message, PeerLost, SocketVan, Van
from braid.ps.consistency import BSP, Consistency
from braid.ps.dense import DenseTable, part_of
from braid.ps.messages import SCHEMA, Leave, Refused
from braid.ps.server import MakeOptimizer, Server
from braid.wire import Secret

__all__ = ["SERVERS", "Node", "join"]

SERVERS = "BRAID_SERVERS"  # number of servers, as `braid run --servers` says
Ask = Callable[[int], tuple[Message, Sequence[memoryview]]]


def join(group: Group, servers: int | None = None, *, address: str = "tcp://127.0.0.1:0") -> Node:
    """Become a server or a worker; a collective.

    Args:
        group: All ranks. The first ones are servers, the others workers.
        servers: Number of servers; what `braid run --servers` says when None.
        address: Address on which servers listen.

    Raises:
        ConfigError: There is no server or no worker.
    """
    if servers is None:
        text = os.environ.get(SERVERS, "")
        if not text.isdecimal():
            msg = (
                "how many ranks are servers? Pass servers=, or start with "
                f"braid run --servers N --workers M ({SERVERS} is {text!r})"
            )
            raise ConfigError(msg)
        servers = int(text)
    if not 0 < servers < group.size:
        msg = f"of {group.size} ranks {servers} cannot be servers: at least one and one worker"
        raise ConfigError(msg)
    secret = Secret(group.objects.broadcast(os.urandom(32)))
    run_id = group.objects.broadcast(os.urandom(8).hex())
    is_server = group.rank < servers
    name = f"server:{group.rank}" if is_server else f"worker:{group.rank - servers}"
    van = SocketVan(name, SCHEMA, secret=secret, run_id=run_id, listen=address if is_server else "")
    addresses = group.objects.all_gather(van.address)[:servers]
    if not is_server:
        for number, where in enumerate(addresses):
            van.connect(f"server:{number}", where)
    group.barrier()  # nobody leaves before all are connected
    return Node(van, group.rank, servers, group.size - servers)


class Node:
    """A server or a worker; made by `join`.

    Attributes:
        is_server: Whether this rank serves.
        number: Number of this server, or of this worker.
        num_servers: Number of servers.
        num_workers: Number of workers.
    """

    def __init__(self, van: Van, rank: int, num_servers: int, num_workers: int) -> None:
        self.is_server = rank < num_servers
        self.number = rank if self.is_server else rank - num_servers
        self.num_servers = num_servers
        self.num_workers = num_workers
        self._van = van
        self._server = Server(van, range(num_workers)) if self.is_server else None
        self._names: set[str] = set()

    def dense(
        self,
        name: str,
        values: torch.Tensor,
        optimizer: MakeOptimizer,
        consistency: Consistency = BSP,
    ) -> DenseTable:
        """Declare a dense table; all ranks declare the same ones.

        Args:
            name: Its name.
            values: First values; servers take their part of them.
            optimizer: Function of parameters that returns an optimizer that changes each element by
                itself, such as `partial(torch.optim.SGD, lr=0.1)`. Servers step it.
            consistency: When pushes are applied, and pulls answered.

        Raises:
            ConfigError: There is a table of this name, or the values are not floating-point.
        """
        if name in self._names:
            msg = f"there is a table {name!r} already"
            raise ConfigError(msg)
        if not values.is_floating_point():
            msg = f"table {name!r} needs floating-point values, got {values.dtype}"
            raise ConfigError(msg)
        self._names.add(name)
        if self._server is not None:
            flat = values.detach().reshape(-1)
            own = flat[part_of(len(flat), self.number, self.num_servers)]
            self._server.add(name, own, optimizer, consistency)
        return DenseTable(self, name, values)

    def serve(self) -> None:
        """Serve until all workers have left.

        Raises:
            ConfigError: This rank is a worker.
            PeerLostError: A worker was lost; it is named.
        """
        if self._server is None:
            msg = f"rank is worker {self.number}, not a server: call serve() if node.is_server"
            raise ConfigError(msg)
        self._server.serve()

    def ask_all(self, ask: Ask, *, timeout_s: float | None = None) -> list[Delivery]:
        """Send a request to each server, and return the answers in the order of servers.

        Raises:
            ConfigError: This rank is a server.
            CommError: A server refuses.
            PeerLostError: A server was lost.
            CommTimeout: An answer did not come.
        """
        if self.is_server:
            msg = f"server {self.number} has the tables: only workers pull and push"
            raise ConfigError(msg)
        waiting: dict[int, int] = {}
        for server in range(self.num_servers):
            message, buffers = ask(server)
            number = self._van.new_id()
            waiting[number] = server
            self._van.send(
                f"server:{server}",
                message,
                buffers=buffers,
                message_id=number,
                deadline_s=timeout_s,
            )
        answers: dict[int, Delivery] = {}
        while waiting:
            delivery = self._van.recv(timeout_s)
            if isinstance(delivery.message, PeerLost):
                msg = f"lost {delivery.sender}: {delivery.message.reason}"
                raise PeerLostError(msg)
            server = waiting.pop(delivery.answers)
            if isinstance(delivery.message, Refused):
                msg = f"server {server} refuses: {delivery.message.text}"
                raise CommError(msg)
            answers[server] = delivery
        return [answers[server] for server in range(self.num_servers)]

    def close(self) -> None:
        """Leave: servers wait for this worker no longer. Idempotent."""
        if not self.is_server:
            for server in self._van.peers:
                self._van.send(server, Leave())
        self._van.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._van.close(0.0)
