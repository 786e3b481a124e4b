"""The decisions of the scheduler, as a state machine: members, chains of shards, and barriers.

    event            result
    join             the first directory once all nodes have joined; later a server gets shards,
                     and a worker gets its place back
    lost server      its chains continue without it; copies are made on other servers; a shard
                     without any copy fails the run
    lost worker      by policy: fail, wait for a new process of its number, shrink, or call a spare
    removed worker   is refused: the run continues without it, or another process has its place
    installed        the next directory
    leave            clocks do not wait for the worker any more; a server's shards move first
    barrier          released when all members have entered; a barrier of a step does not wait for
                     the replacement of a lost worker, which may continue before or after the step

The scheduler takes no part in pushes and pulls, which continue while it is gone. Its journal
contains its last directory.

Source: M. Li et al., Parameter Server, OSDI 2014, sections 4.2 to 4.5; PS-Lite's scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from braid.errors import CommError, StaleError
from braid.ps.protocol.data_state import DataState, Issue
from braid.ps.protocol.directory import Directory, server_node, worker_node
from braid.ps.protocol.members_state import MembersState, PublishDirectory, ReleaseNodes
from braid.runtime.message import split_node

__all__ = [
    "CallSpare",
    "FailRun",
    "OnWorkerLoss",
    "SchedulerState",
    "StopWorkers",
]

OnWorkerLoss: TypeAlias = Literal["fail", "wait", "shrink", "replace"]


class FailRun(NamedTuple):
    """Instruction: send all nodes the error that ends the run."""

    text: str


class CallSpare(NamedTuple):
    """Instruction: order a spare to replace a lost worker."""

    spare: int
    worker: int


class StopWorkers(NamedTuple):
    """Instruction: send all workers the clock before which they stop."""

    clock: int


Instruction: TypeAlias = CallSpare | StopWorkers | PublishDirectory | ReleaseNodes | FailRun | Issue


class SchedulerState(MembersState[str, int]):
    """State machine of the scheduler: members, servers of each shard, and barriers.

    Args:
        num_servers: Number of servers that must join before the first directory.
        num_workers: Number of workers that must join before the first directory.
        replicas: Number of copies of each shard, in addition to the head's.
        on_worker_loss: Policy for the loss of a worker.
        directory: Last directory of an earlier scheduler, from its journal.

    Raises:
        ConfigError: There are not enough servers for the copies.
    """

    def __init__(
        self,
        num_servers: int,
        num_workers: int,
        *,
        replicas: int = 0,
        on_worker_loss: OnWorkerLoss = "fail",
        directory: Directory | None = None,
    ) -> None:
        super().__init__(num_servers, num_workers, directory)
        self._replicas = replicas
        self._on_worker_loss = on_worker_loss
        self.failure = ""
        self._spares: list[int] = []  # have joined, and are not called yet
        self._called: dict[int, int] = {}  # called spare -> worker that has no new process yet
        self._vacant: list[int] = []  # lost workers that wait for a spare or a new process
        self._gone: set[int] = set()  # workers that have left
        self._lives: dict[int, int] = {}  # process of each worker, as its incarnation
        self._removed: dict[tuple[int, int], str] = {}  # worker and process, with the reason
        self._steps: dict[str, tuple[str, int]] = {}  # of each barrier of a step
        self._passed: dict[str, int] = {}  # last step of each name that was released
        self._since: dict[str, float] = {}  # first step of successors as members; inf if unknown
        self._data: dict[str, DataState] = {}
        self.missing: set[tuple[str, int]] = set()  # role and number of nodes of an earlier life
        if directory is not None:
            self.addresses = {worker_node(number): "" for number in directory.workers}
            self._lives = dict(directory.lives)
            self.missing = {("server", number) for number in directory.servers}
            self.missing |= {("worker", number) for number in directory.workers}
        self._tables: dict[str, tuple[str, str]] = {}  # first node that declared it, and its form
        self._firsts: dict[str, tuple[str, int]] = {}  # first server that did, and its checksum
        self._stop = 0
        self._weights: list[float] | None = None
        self._counts: dict[int, list[int]] = {}
        self._leaving: dict[int, tuple[str, int]] = {}  # request of each leaving server
        Directory.begin(dict.fromkeys(range(num_servers), ""), (), replicas)  # checks the numbers

    # -- events

    def check_tables(self, node: str, tables: Mapping[str, tuple[str, int]]) -> list[Instruction]:
        """Fail the run if a node's declaration of a table differs from an earlier node's.

        Before the first directory, servers must also agree on first values. A server that joins
        later receives its values from another server.

        Raises:
            CommError: The run has begun already: only this node is refused.
        """
        is_server = node.startswith("server:")
        for name, (form, first) in tables.items():
            known = self._tables.setdefault(name, (node, form))
            if known[1] != form:
                msg = (
                    f"table {name!r} differs: {known[0]} has {known[1]}, {node} has {form}; "
                    "declare the same table on all nodes"
                )
                if self.directory is None:
                    return self._fail(msg)
                raise CommError(msg)
            if not is_server or self.directory is not None:
                continue
            other = self._firsts.setdefault(name, (node, first))
            if other[1] != first:
                return self._fail(
                    f"table {name!r} begins with other values on {node} than on {other[0]}: set "
                    "the same seed on all nodes before the values are made"
                )
        return []

    def server_joins(self, server: int, address: str) -> list[Instruction]:
        """Add a server; once all nodes have joined, the result sends them the first directory."""
        self.missing.discard(("server", server))
        if self.directory is None:
            self.addresses[server_node(server)] = address
            return self._begin()
        if server in self.directory.servers:  # its link was cut, or the scheduler is new
            return [PublishDirectory(self.directory)]
        return self._change(self.directory.with_server(server, address))

    def check_worker(self, worker: int, life: int) -> None:
        """Refuse the process of a worker, numbered `life`, if it was removed from the run.

        Raises:
            StaleError: The process was removed; the message has the reason.
        """
        if reason := self._removed.get((worker, life)):
            msg = (
                f"worker {worker} was removed from the run, which continues without this worker: "
                f"{reason}"
            )
            raise StaleError(msg)

    def worker_joins(
        self, worker: int, start: int = 0, life: int = 0, *, was_member: bool = False
    ) -> list[Instruction]:
        """Add a worker; one that joins a running job begins at the clock `start`.

        Args:
            worker: Number of the worker.
            start: First clock of the worker.
            life: Incarnation of its process.
            was_member: Whether this process has been a worker of the run before.

        Raises:
            StaleError: The process was removed.
        """
        self.check_worker(worker, life)
        known = None if self.directory is None else self.directory.lives.get(worker)
        if self.directory is not None and life != known:
            if was_member:  # removed by an earlier scheduler
                self._removed[worker, life] = "it was lost for too long"
                self.check_worker(worker, life)
            if known is not None:
                self._removed[worker, known] = "another process has taken its place"
        self._lives[worker] = life
        self._vacant = [number for number in self._vacant if number != worker]
        self._called = {spare: place for spare, place in self._called.items() if place != worker}
        self.addresses[worker_node(worker)] = ""
        self._gone.discard(worker)
        self.missing.discard(("worker", worker))
        if self.directory is None:
            return self._begin()
        if worker in self.directory.workers and life == known:
            return [PublishDirectory(self.directory)]
        workers = {**self.directory.workers}
        workers.setdefault(worker, start)
        return self._change(self.directory.with_workers(workers, self._lives))

    def spare_joins(self, spare: int) -> list[Instruction]:
        """Add a spare process; call it immediately if a lost worker has no replacement yet."""
        if spare in self._called:  # the call was lost with a link: a called spare joins as a worker
            return [CallSpare(spare, self._called[spare])]
        if spare not in self._spares:
            self._spares.append(spare)
        return self._call_spare(self._vacant.pop(0)) if self._vacant else []

    def spare_lost(self, spare: int) -> list[Instruction]:
        """Remove a spare that was lost, or has been called."""
        self._spares = [other for other in self._spares if other != spare]
        return []

    def calls(self) -> list[Instruction]:
        """Return the calls of spares that have not replaced their workers, to send them again."""
        return [CallSpare(spare, worker) for spare, worker in self._called.items()]

    def worker_leaves(self, worker: int, life: int = 0) -> list[Instruction]:
        """Remove a worker that has finished, in its process with the number `life`."""
        if life != self._lives.get(worker):
            return []  # another process has its place
        self._gone.add(worker)
        self.missing.discard(("worker", worker))
        return [*self._deal_again(worker), *self._remove(worker)]

    def worker_lost(self, worker: int, reason: str, life: int = 0) -> list[Instruction]:
        """Handle the loss of a worker's process `life`, by the policy `on_worker_loss`."""
        if worker in self._gone or worker_node(worker) not in self.addresses or self.failure:
            return []
        if life != self._lives.get(worker):
            return []  # another process has its place
        del self.addresses[worker_node(worker)]
        if self._on_worker_loss == "fail":
            return self._fail(f"lost worker {worker}: {reason}")
        again = self._deal_again(worker)
        if self._on_worker_loss in {"replace", "wait"}:
            self._since[f"worker:{worker}"] = math.inf
            for name in self._steps:
                self._expected[name] -= {f"worker:{worker}"}
            again += self._released()
        if self._on_worker_loss == "wait" and not self._spares:
            self._vacant.append(worker)
            return again
        if self.directory is not None:
            self._removed[worker, life] = reason
        if self._on_worker_loss in {"replace", "wait"}:
            if not self._spares:
                return self._fail(f"lost worker {worker}: {reason}. No spare is left for it")
            return [*again, *self._call_spare(worker)]
        return [*again, *self._remove(worker)]

    def release_lost(self) -> list[Instruction]:
        """Remove lost workers from the run, instead of waiting for their new processes."""
        self._called.clear()
        workers = [] if self.directory is None else list(self.directory.workers)
        lost = [number for number in workers if worker_node(number) not in self.addresses]
        return [instruction for number in lost for instruction in self._remove(number)]

    def server_leaves(self, server: int, request: tuple[str, int]) -> list[Instruction]:
        """Move a server's shards to other servers, then remove it.

        Raises:
            CommError: The first directory does not exist yet, or no other server would remain.
        """
        if self.directory is None:
            msg = (
                f"server {server} cannot leave before all servers and workers have joined: call "
                "drain() later"
            )
            raise CommError(msg)
        if len(self.directory.servers) - len({*self.directory.leaving, server}) < 1:
            msg = (
                f"server {server} cannot leave: the last server has all shards. Call close() to "
                "end the run"
            )
            raise CommError(msg)
        self._leaving[server] = request
        return self._change(self.directory.drained(server))

    def server_lost(self, server: int, reason: str) -> list[Instruction]:
        """Remove a lost server; fail the run if a shard has no other copy."""
        directory = self.directory
        # if the first directory does not exist yet, it waits for another server
        self.addresses.pop(server_node(server), None)
        if directory is None or server not in directory.servers or self.failure:
            return []
        before = set(directory.lost)
        self._leaving.pop(server, None)
        directory = directory.without(server)
        if missing := sorted(set(directory.lost) - before):
            self.directory = directory
            return self._fail(
                f"lost server {server}: {reason}. With it {len(missing)} of "
                f"{len(directory.chains)} virtual shards are gone, since no server has a copy: "
                "resume from a snapshot, and start with replicas=1 to outlive a server"
            )
        return self._change(directory)

    def installed(self, shard: int, server: int, since: int) -> list[Instruction]:
        """Record that `server`, added in epoch `since`, has received a virtual shard's state."""
        if self.directory is None:
            return []
        directory = self.directory.installed(shard, server, since)
        return [] if directory is self.directory else self._change(directory)

    def balance(self, server: int, counts: list[int]) -> list[Instruction]:
        """Record a server's request counts; once all servers have reported, move hot shards."""
        directory = self.directory
        if directory is None or len(counts) != len(directory.chains):
            return []
        self._counts[server] = counts
        if self._counts.keys() < directory.servers.keys():
            return []
        totals = [sum(column) for column in zip(*self._counts.values(), strict=True)]
        self._counts.clear()
        mean = sum(totals) / len(totals) or 1.0
        now = [max(total / mean, 0.01) for total in totals]
        before = self._weights or now
        self._weights = [(a + b) / 2 for a, b in zip(before, now, strict=True)]  # less noise
        return self._change(directory) if directory.moves(self._weights) else []

    def stop_at(self, clock: int) -> list[Instruction]:
        """Stop all workers before a clock; the first request determines the clock."""
        self._stop = self._stop or clock
        return [StopWorkers(self._stop)]

    def barrier(
        self, name: str, node: str, request: int, members: frozenset[str], step: int = -1
    ) -> list[Instruction]:
        """Add a node to a barrier, which is released once all `members` have entered.

        A barrier of a `step` does not wait for the replacement of a lost worker, which may continue
        after that step. The replacement passes the steps that were released without it
        immediately, and is a member again from the first later step on.
        """
        if step >= 0:
            if self._since.get(node) == math.inf:
                if step <= self._passed.get(name, -1):
                    return [ReleaseNodes(((node, request),))]
                self._since[node] = step
            members = frozenset(member for member in members if self._since.get(member, 0) <= step)
            at, name = (name, step), f"{name} {step}"
            self._steps[name] = at
        self._arrive(name, node, request, members)
        return self._released()

    def _released(self) -> list[Instruction]:
        """Release the barriers that all remaining members have entered."""
        out: list[Instruction] = []
        for name in self._reached:
            out.append(ReleaseNodes(tuple(self._close(name).items())))
            if name in self._steps:
                of, step = self._steps.pop(name)
                self._passed[of] = max(step, self._passed.get(of, -1))
        return out

    def next_data(
        self, name: str, num_shards: int, request: tuple[str, int], finished: tuple[int, ...]
    ) -> list[Instruction]:
        """Deal out the next shard of the samples with a name.

        Raises:
            CommError: Workers divide the samples differently.
        """
        data = self._data.setdefault(name, DataState(num_shards))
        if data.num_shards != num_shards:
            msg = (
                f"{request[0]} divides {name!r} into {num_shards} shards, another worker into "
                f"{data.num_shards}: pass the same num_samples, shard_size and epochs on all "
                "workers"
            )
            raise CommError(msg)
        return [*data.next(request[0], request, finished)]

    def drop_missing(self) -> list[Instruction]:
        """After a restart of the scheduler, treat nodes that did not reconnect as lost."""
        missing, self.missing = sorted(self.missing), set()
        reason = "it did not come back to the scheduler, which was started again"
        out: list[Instruction] = []
        for role, number in missing:
            if role == "server":
                out += self.server_lost(number, reason)
            else:
                out += self.worker_lost(number, reason, self._lives.get(number, 0))
        return out

    def waiting(self) -> list[str]:
        """Return lines of text with the nodes that have not joined, or are missing in barriers."""
        absent = ", ".join(self.absent).replace(":", " ")
        lines = [f"{absent} did not join"] if self.directory is None else []
        return lines + [
            f"{', '.join(sorted(self._lacks(name)))} did not come to barrier {name!r}"
            for name in self._arrived
        ]

    def awaited(self) -> frozenset[str]:
        """Return the nodes that have not joined, or are missing in a barrier."""
        if self.directory is None:
            return frozenset(self.absent)
        return frozenset().union(*map(self._lacks, self._arrived))

    # -- inside

    def _deal_again(self, worker: int) -> list[Instruction]:
        return [issue for data in self._data.values() for issue in data.lost(f"worker:{worker}")]

    def _begin(self) -> list[Instruction]:
        nodes = [(*split_node(node), address) for node, address in self.addresses.items()]
        servers = {number: address for role, number, address in nodes if role == "server"}
        workers = sorted(number for role, number, _ in nodes if role == "worker")
        if len(servers) < self._num_servers or len(workers) < self._num_workers:
            return []
        self.directory = Directory.begin(servers, workers, self._replicas, lives=self._lives)
        return [PublishDirectory(self.directory)]

    def _call_spare(self, worker: int) -> list[Instruction]:
        spare = self._spares.pop(0)
        self._called[spare] = worker
        return [*self._vacate(worker), CallSpare(spare, worker)]

    def _vacate(self, worker: int) -> list[Instruction]:
        """Remove the process of a worker: servers refuse it, and another may take its place."""
        self._lives.pop(worker, None)
        if self.directory is None:
            return []
        return self._change(self.directory.with_workers(self.directory.workers, self._lives))

    def _remove(self, worker: int) -> list[Instruction]:
        directory = self.directory
        self._lives.pop(worker, None)
        if directory is None or worker not in directory.workers:
            return []
        rest = {other: start for other, start in directory.workers.items() if other != worker}
        node = f"worker:{worker}"
        self._expected = {name: them - {node} for name, them in self._expected.items()}
        return [*self._change(directory.with_workers(rest, self._lives)), *self._released()]

    def _change(self, directory: Directory) -> list[Instruction]:
        """Publish a directory, after adding the copies and moves that it needs."""
        if moves := directory.moves(self._weights):
            directory = directory.with_copies(moves)
        self.directory = directory
        loads = directory.loads()
        free = [server for server in self._leaving if not loads[server]]
        released = tuple(self._leaving.pop(server) for server in free)
        for server in free:
            self.directory = directory = directory.without(server)
        return [PublishDirectory(directory), *([ReleaseNodes(released)] if released else [])]

    def _fail(self, text: str) -> list[Instruction]:
        self.failure = text
        return [FailRun(text)]
