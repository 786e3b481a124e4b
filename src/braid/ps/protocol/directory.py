"""Names of nodes, the directory of shards, and its changes after deaths, arrivals and load.

Tables are divided into shards; shard i of a table lies on the chain of virtual shard
(place of the table + i) mod 64. There are many more virtual shards than servers, so that a new
server relieves all others a little, and the shards of a dead one go to all.

    chain of a virtual shard     2 -> 0 -> 1      head first: it decides; the others have copies
    server 2 is lost             0 -> 1
    a copy is wanted again       0 -> 1 -> 3*     3 joins: it gets the state of 1
    3 has the state              0 -> 1 -> 3

Each change is a new directory with the next epoch. All functions are pure.

Source: M. Li et al., Parameter Server, OSDI 2014, sections 4.2 and 4.3; consistent hashing with
virtual nodes: D. Karger et al., STOC 1997, in place of which chains are moved one by one, so that
no more moves than needed.
"""

from __future__ import annotations

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
UNEVEN = 0.25  # part of the mean load by which measured loads must differ before shards move


def server_node(number: int) -> str:
    """Return the name of a server."""
    return f"server:{number}"


def worker_node(number: int) -> str:
    """Return the name of a worker."""
    return f"worker:{number}"


def name_of(role: Role, number: int) -> str:
    """Return the name of a node."""
    return SCHEDULER if role == "scheduler" else f"{role}:{number}"


def virtual_shard(table: str, shard: int, count: int = NUM_VIRTUAL) -> int:
    """Return the virtual shard on which a shard of a table lies; the same on all nodes."""
    return (zlib.crc32(table.encode()) + shard) % count


class Directory(msgspec.Struct, frozen=True, kw_only=True):
    """Servers, chains and workers of one epoch.

    Attributes:
        epoch: Number of the directory.
        replicas: Copies of each shard beside the head's.
        servers: Servers that are alive, with their addresses.
        chains: Servers of each virtual shard, the head first; nobody when it is lost.
        joining: Servers among them that have no state yet, with the epoch since which they join.
        workers: Workers for which a clock waits, with the first clock of each.
        leaving: Servers that get no shards, and leave when they have none.
        lives: Process of each worker, as the incarnation of its van; a worker whose process was
            lost has none until another process takes its place.
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
        """Return the directory of a run without tables."""
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
        """Return the first directory; chains begin at each server in turn.

        Raises:
            ConfigError: There are not enough servers for the copies.
        """
        numbers = sorted(servers)
        if not 0 <= replicas < len(numbers):
            msg = (
                f"{replicas} replicas of each shard need {replicas + 1} servers, and there are "
                f"{len(numbers)}"
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
        """Virtual shards whose last copy is gone."""
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
        """Return the server that decides on a virtual shard; None when it is lost."""
        return next(iter(self.chains[shard]), None)

    def head_node(self, virtual: int) -> str | None:
        """Return the server that decides on a virtual shard; None when the shard is lost."""
        chain = self.chains[virtual]
        return server_node(chain[0]) if chain else None

    def heads(self) -> Counter[int]:
        """Return of how many virtual shards each server is the head."""
        return Counter(chain[0] for chain in self.chains if chain)

    def loads(self) -> Counter[int]:
        """Return of how many chains each server is a member."""
        loads = Counter(dict.fromkeys(self.servers, 0))
        loads.update(server for chain in self.chains for server in chain)
        return loads

    # -- changes

    def with_workers(self, workers: Mapping[int, int], lives: Mapping[int, int]) -> Directory:
        """Return it with other workers, or other processes of them."""
        return self._next(workers=dict(workers), lives=dict(lives))

    def without(self, server: int) -> Directory:
        """Return it after the loss of a server; a shard without a copy that is whole is lost."""
        chains, joining = [], []
        for chain, new in zip(self.chains, self.joining, strict=True):
            rest = tuple(each for each in chain if each != server)
            if all(each in new for each in rest):
                rest = ()
            chains.append(rest)
            joining.append({each: since for each, since in new.items() if each in rest})
        servers = {number: where for number, where in self.servers.items() if number != server}
        return self._next(
            servers=servers,
            chains=tuple(chains),
            joining=tuple(joining),
            leaving=tuple(each for each in self.leaving if each != server),
        )

    def with_server(self, server: int, address: str) -> Directory:
        """Return it with one more server, which has no shards yet."""
        return self._next(servers={**self.servers, server: address})

    def drained(self, server: int) -> Directory:
        """Return it with a server that is to leave: `moves` takes its shards from it."""
        return self._next(leaving=tuple(sorted({*self.leaving, server})))

    def with_copies(self, moves: Iterable[tuple[int, int]]) -> Directory:
        """Return it with servers that join chains: virtual shard and server of each."""
        chains, joining = list(self.chains), list(self.joining)
        for shard, server in moves:
            assert server not in chains[shard], "a server is in a chain once"
            chains[shard] = (*chains[shard], server)
            joining[shard] = {**joining[shard], server: self.epoch + 1}
        return self._next(chains=tuple(chains), joining=tuple(joining))

    def installed(self, shard: int, server: int, since: int) -> Directory:
        """Return it after a server that joins has got a virtual shard's state.

        A chain that is now too long loses its most loaded server, one that leaves before others.
        """
        if self.joining[shard].get(server) != since:
            return self
        chains, joining = list(self.chains), list(self.joining)
        joining[shard] = {each: at for each, at in joining[shard].items() if each != server}
        if len(chains[shard]) > self.length:
            loads = self.loads()
            others = [each for each in chains[shard] if each != server]
            surplus = max(others, key=lambda each: (each in self.leaving, loads[each], -each))
            chains[shard] = tuple(each for each in chains[shard] if each != surplus)
        return self._next(chains=tuple(chains), joining=tuple(joining))

    @property
    def length(self) -> int:
        """Servers that a chain should have."""
        return min(self.replicas + 1, len(self.servers) - len(self.leaving))

    def moves(self, weights: Sequence[float] | None = None) -> list[tuple[int, int]]:
        """Return which servers should join which virtual shards: for copies, then for balance.

        Args:
            weights: Load of each virtual shard, such as its requests; equal when None.
        """
        weight = [1.0] * len(self.chains) if weights is None else list(weights)
        staying = [each for each in self.servers if each not in self.leaving]
        loads = dict.fromkeys(staying, 0.0)
        for shard, chain in enumerate(self.chains):
            for server in chain:
                if server in loads:
                    loads[server] += weight[shard]
        moves: list[tuple[int, int]] = []
        busy = {shard for shard, new in enumerate(self.joining) if new}
        for shard, chain in enumerate(self.chains):
            missing = self.length - sum(each in loads for each in chain)
            outside = [each for each in staying if each not in chain]
            if chain and missing > 0 and outside and shard not in busy:
                target = min(outside, key=lambda each: (loads[each], each))
                loads[target] += weight[shard]
                moves.append((shard, target))
                busy.add(shard)
        # the servers that moves under way will relieve are chosen when they end: until then, loads
        # show servers too busy, and moves for balance would be undone by later ones
        if any(self.joining):
            return moves
        enough = 0.0 if weights is None else UNEVEN * sum(loads.values()) / max(len(loads), 1)
        return moves + self._balance(loads, weight, busy, enough)

    def _balance(
        self, loads: dict[int, float], weight: list[float], busy: set[int], enough: float
    ) -> list[tuple[int, int]]:
        """Return moves from the most to the least loaded servers, while they differ enough."""
        moves: list[tuple[int, int]] = []
        while len(loads) > 1:
            source = max(loads, key=lambda each: (loads[each], each))
            target = min(loads, key=lambda each: (loads[each], each))
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
            shard = min(fits, key=lambda each: abs(gap / 2 - weight[each]))
            loads[source] -= weight[shard]
            loads[target] += weight[shard]
            moves.append((shard, target))
            busy.add(shard)
        return moves

    def _next(self, **changes: object) -> Directory:
        return msgspec.structs.replace(self, epoch=self.epoch + 1, **changes)
