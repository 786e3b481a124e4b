"""Names of nodes, the directory of shards, and its changes after losses, joins and load reports.

Tables are divided into shards; shard i of a table is on the chain of virtual shard
(place of the table + i) mod 64. There are many more virtual shards than servers, so that a new
server takes a few shards from every other, and the shards of a dead one are spread over all.

    chain of a virtual shard     2 -> 0 -> 1      head first: it decides; the others have copies
    server 2 is lost             0 -> 1
    server 3 joins the chain     0 -> 1 -> 3*     1 sends it the state
    3 has the state              0 -> 1 -> 3

Each change is a new directory with the next epoch. All functions are pure.

Source: M. Li et al., Parameter Server, OSDI 2014, sections 4.2 and 4.3. Instead of consistent
hashing with virtual nodes (D. Karger et al., STOC 1997), chains are moved one by one, so that only
the necessary shards move.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from braid.errors import ConfigError

__all__ = [
    "NUM_VIRTUAL",
    "SCHEDULER",
    "SPARE",
    "Directory",
    "Role",
    "name_of",
    "server_node",
    "virtual_shard",
    "worker_node",
]

Role: TypeAlias = Literal["scheduler", "server", "worker", "spare"]
SCHEDULER: Final = "scheduler"
SPARE: Final = "spare"
NUM_VIRTUAL = 64
UNEVEN = 0.25  # fraction of the mean load by which measured loads must differ before shards move


@functools.lru_cache(maxsize=4096)
def server_node(number: int) -> str:
    """Return the name of the server with a number, such as `server:2`."""
    return f"server:{number}"


def worker_node(number: int) -> str:
    """Return the name of the worker with a number, such as `worker:2`."""
    return f"worker:{number}"


def name_of(role: Role, number: int) -> str:
    """Return the name of the node with a role and a number, such as `worker:2`."""
    return SCHEDULER if role == "scheduler" else f"{role}:{number}"


@functools.lru_cache(maxsize=4096)
def virtual_shard(table: str, shard: int, count: int = NUM_VIRTUAL) -> int:
    """Return the number of a shard's virtual shard, a set of shards on the same servers."""
    return (zlib.crc32(table.encode()) + shard) % count


class Directory(msgspec.Struct, frozen=True, kw_only=True):
    """Servers and workers of one epoch, and the chain of each shard: the servers with its copies.

    Attributes:
        epoch: Number of the directory.
        replicas: Number of copies of each shard, in addition to the head's.
        servers: Address of each live server.
        chains: Servers of each virtual shard, the head first; empty when the shard is lost.
        joining: For each chain, the servers without state yet, with the epoch of their joining.
        workers: First clock of each live worker; a clock is complete when these have pushed it.
        leaving: Servers that receive no more shards, and leave once they have none.
        lives: Incarnation number of each worker's process; a worker that has lost its process has
            no entry until another process replaces it.
        nodes: Addresses of nodes that are alive, by name, in a run without tables.
        lost_nodes: Lost nodes of a run without tables, with the reason.
    """

    epoch: int
    replicas: int
    servers: dict[int, str]
    chains: tuple[tuple[int, ...], ...]
    joining: tuple[dict[int, int], ...]
    workers: dict[int, int]
    leaving: tuple[int, ...] = ()
    lives: dict[int, int] = {}
    nodes: dict[str, str] = {}
    lost_nodes: dict[str, str] = {}

    @classmethod
    def of_nodes(cls, epoch: int, nodes: dict[str, str], lost_nodes: dict[str, str]) -> Directory:
        """Return the directory with the number `epoch`, of a run without tables."""
        return cls(
            epoch=epoch,
            replicas=0,
            servers={},
            chains=(),
            joining=(),
            workers={},
            nodes=nodes,
            lost_nodes=lost_nodes,
        )

    @classmethod
    def begin(
        cls,
        servers: Mapping[int, str],
        workers: Sequence[int],
        replicas: int = 0,
        count: int = NUM_VIRTUAL,
        *,
        lives: Mapping[int, int] = {},
    ) -> Directory:
        """Return the first directory; the first copies of shards are on the servers in turn.

        Raises:
            ConfigError: There are not enough servers for the copies.
        """
        numbers = sorted(servers)
        if not 0 <= replicas < len(numbers):
            msg = (
                f"{replicas} replicas of each shard need {replicas + 1} servers, but only "
                f"{len(numbers)} exist: start more servers"
            )
            raise ConfigError(msg)
        chains = tuple(
            tuple(numbers[(shard + place) % len(numbers)] for place in range(replicas + 1))
            for shard in range(count)
        )
        return cls(
            epoch=0,
            replicas=replicas,
            servers=dict(servers),
            chains=chains,
            joining=tuple({} for _ in chains),
            workers=dict.fromkeys(workers, 0),
            lives=dict(lives),
        )

    @property
    def lost(self) -> tuple[int, ...]:
        """Virtual shards without any copy."""
        return tuple(shard for shard, chain in enumerate(self.chains) if not chain)

    def address_of(self, node: str) -> str | None:
        """Return the address of a node that is alive and listens; None for others."""
        role, _, number = node.partition(":")
        return (
            self.servers.get(int(number))
            if role == "server" and self.servers
            else self.nodes.get(node)
        )

    def head(self, shard: int) -> int | None:
        """Return the number of the server that decides on a virtual shard; None if it is lost."""
        return next(iter(self.chains[shard]), None)

    def head_node(self, virtual: int) -> str | None:
        """Return the name of the server that decides on a virtual shard; None if it is lost."""
        chain = self.chains[virtual]
        return server_node(chain[0]) if chain else None

    def heads(self) -> Counter[int]:
        """Return the number of virtual shards with each server as their head."""
        return Counter(chain[0] for chain in self.chains if chain)

    def loads(self) -> Counter[int]:
        """Return the number of chains (servers with copies of a shard) that each server is in."""
        loads = Counter(dict.fromkeys(self.servers, 0))
        loads.update(server for chain in self.chains for server in chain)
        return loads

    # -- changes

    def with_workers(self, workers: Mapping[int, int], lives: Mapping[int, int]) -> Directory:
        """Return the directory with other `workers` and `lives`; see the attributes."""
        return self._next(workers=dict(workers), lives=dict(lives))

    def without(self, server: int) -> Directory:
        """Return the directory after the loss of a server; shards without a full copy are lost."""
        chains, joining = [], []
        for chain, new in zip(self.chains, self.joining, strict=True):
            rest = tuple(member for member in chain if member != server)
            if all(member in new for member in rest):
                rest = ()
            chains.append(rest)
            joining.append({member: since for member, since in new.items() if member in rest})
        servers = {number: where for number, where in self.servers.items() if number != server}
        return self._next(
            servers=servers,
            chains=tuple(chains),
            joining=tuple(joining),
            leaving=tuple(member for member in self.leaving if member != server),
        )

    def with_server(self, server: int, address: str) -> Directory:
        """Return the directory with one more server, which has no shards yet."""
        return self._next(servers={**self.servers, server: address})

    def drained(self, server: int) -> Directory:
        """Return the directory with a server marked as leaving, so that `moves` replaces it."""
        return self._next(leaving=tuple(sorted({*self.leaving, server})))

    def with_copies(self, moves: Iterable[tuple[int, int]]) -> Directory:
        """Return the directory with new copies of shards: `moves` are (virtual shard, server)."""
        chains, joining = list(self.chains), list(self.joining)
        for shard, server in moves:
            assert server not in chains[shard], "a server is in a chain once"
            chains[shard] = (*chains[shard], server)
            joining[shard] = {**joining[shard], server: self.epoch + 1}
        return self._next(chains=tuple(chains), joining=tuple(joining))

    def installed(self, shard: int, server: int, since: int) -> Directory:
        """Return the directory after a joining server has received a virtual shard's state.

        `since` is the epoch in which the server was added to the shard's chain of servers.

        If the chain is now too long, it loses a leaving server, else its most loaded one.
        """
        if self.joining[shard].get(server) != since:
            return self
        chains, joining = list(self.chains), list(self.joining)
        joining[shard] = {other: at for other, at in joining[shard].items() if other != server}
        if len(chains[shard]) > self.length:
            loads = self.loads()
            others = [other for other in chains[shard] if other != server]
            surplus = max(others, key=lambda other: (other in self.leaving, loads[other], -other))
            chains[shard] = tuple(other for other in chains[shard] if other != surplus)
        return self._next(chains=tuple(chains), joining=tuple(joining))

    @property
    def length(self) -> int:
        """Number of servers that a chain (the servers with copies of a shard) should have."""
        return min(self.replicas + 1, len(self.servers) - len(self.leaving))

    def moves(self, weights: Sequence[float] | None = None) -> list[tuple[int, int]]:
        """Return the (virtual shard, server) pairs that `with_copies` should add to chains.

        Pairs replace missing copies; if no copy is missing, they balance the load of the servers.

        Args:
            weights: Load of each virtual shard, such as its number of requests; equal when None.
        """
        weight = [1.0] * len(self.chains) if weights is None else list(weights)
        staying = [server for server in self.servers if server not in self.leaving]
        loads = dict.fromkeys(staying, 0.0)
        for shard, chain in enumerate(self.chains):
            for server in chain:
                if server in loads:
                    loads[server] += weight[shard]
        moves: list[tuple[int, int]] = []
        busy = {shard for shard, new in enumerate(self.joining) if new}
        for shard, chain in enumerate(self.chains):
            missing = self.length - sum(server in loads for server in chain)
            outside = [server for server in staying if server not in chain]
            if chain and missing > 0 and outside and shard not in busy:
                target = min(outside, key=lambda server: (loads[server], server))
                loads[target] += weight[shard]
                moves.append((shard, target))
                busy.add(shard)
        # a move under way takes load from a server that is chosen only when the move ends: until
        # then that server's load is too high, and later moves would undo a move for balance
        if any(self.joining):
            return moves
        enough = 0.0 if weights is None else UNEVEN * sum(loads.values()) / max(len(loads), 1)
        return moves + self._balance(loads, weight, busy, enough)

    def _balance(
        self, loads: dict[int, float], weight: list[float], busy: set[int], enough: float
    ) -> list[tuple[int, int]]:
        """Return moves from the most to the least loaded server until their gap is `enough`."""
        moves: list[tuple[int, int]] = []
        while len(loads) > 1:
            source = max(loads, key=lambda server: (loads[server], server))
            target = min(loads, key=lambda server: (loads[server], server))
            gap = loads[source] - loads[target]
            if gap <= enough:
                return moves
            fits = [
                shard
                for shard, chain in enumerate(self.chains)
                if source in chain and target not in chain and shard not in busy
                if 0 < weight[shard] < gap
            ]
            if not fits:
                return moves
            shard = min(fits, key=lambda fit: abs(gap / 2 - weight[fit]))
            loads[source] -= weight[shard]
            loads[target] += weight[shard]
            moves.append((shard, target))
            busy.add(shard)
        return moves

    def _next(self, **changes: object) -> Directory:
        return msgspec.structs.replace(self, epoch=self.epoch + 1, **changes)
