"""The decisions of the scheduler, as a state machine: who is here, where shards lie, who waits.

    event            what follows
    join             the first directory when all are here; then a server gets shards, a worker its
                     place back
    lost server      its chains go on without it; copies are made elsewhere; a shard without any
                     copy fails the run
    lost worker      by policy: fail, wait for a new process of its number, shrink, or call a spare
    removed worker   is refused: the others have gone on without it, or another has its place
    installed        the next directory
    leave            a worker is waited for no longer; a server's shards go to others first
    barrier          released when all of its group have come; one of a step does not wait for the
                     successor of a lost worker, which may go on behind the step or before it

The scheduler has no part in pushes and pulls. While it is gone, they go on; its journal is its last
directory.

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
    """Inform all nodes that the run cannot go on."""

    text: str


class CallSpare(NamedTuple):
    """Let a spare take the place of a worker."""

    spare: int
    worker: int


class StopWorkers(NamedTuple):
    """Inform all workers of the clock before which they stop."""

    clock: int


Instruction: TypeAlias = CallSpare | StopWorkers | PublishDirectory | ReleaseNodes | FailRun | Issue


class SchedulerState(MembersState[str, int]):
    """State of the scheduler.

    Args:
        num_servers: Servers that the first directory waits for.
        num_workers: Workers that it waits for.
        replicas: Copies of each shard beside the head's.
        on_worker_loss: Policy for the loss of a worker.
        directory: The last one of an earlier life, from its journal.

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
        self._spares: list[int] = []  # that are here, and not called
        self._vacant: list[int] = []  # workers that were lost, and wait for a spare or a process
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
        self._tables: dict[str, tuple[str, str]] = {}  # who declared it first, and its form
        self._firsts: dict[str, tuple[str, int]] = {}  # who declared it, and its checksum
        self._stop = 0
        self._weights: list[float] | None = None
        self._counts: dict[int, list[int]] = {}
        self._leaving: dict[int, tuple[str, int]] = {}  # servers, with who waits for it
        Directory.begin(dict.fromkeys(range(num_servers), ""), (), replicas)  # checks the numbers

    # -- events

    def check_tables(self, node: str, tables: Mapping[str, tuple[str, int]]) -> list[Instruction]:
        """Fail the run if a node declares a table in another way than a node before it did.

        Servers must agree on first values, too, until there is a directory: a server that comes
        later gets the values of another one.

        Raises:
            CommError: The run has begun, and this node alone is refused.
        """
        is_server = node.startswith("server:")
        for name, (form, first) in tables.items():
            known = self._tables.setdefault(name, (node, form))
            if known[1] != form:
                msg = (
                    f"table {name!r} differs: {known[0]} has {known[1]}, {node} has {form}; "
                    "declare the same on all nodes"
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
        """Take in a server; the first ones become the first directory."""
        self.missing.discard(("server", server))
        if self.directory is None:
            self.addresses[server_node(server)] = address
            return self._begin()
        if server in self.directory.servers:  # its link was cut, or the scheduler is new
            return [PublishDirectory(self.directory)]
        return self._change(self.directory.with_server(server, address))

    def check_worker(self, worker: int, life: int) -> None:
        """Refuse a process that was a worker, and was removed.

        Raises:
            StaleError: It was removed; says why.
        """
        if reason := self._removed.get((worker, life)):
            msg = f"worker {worker} was removed from the run, which goes on without it: {reason}"
            raise StaleError(msg)

    def worker_joins(
        self, worker: int, start: int = 0, life: int = 0, *, was_member: bool = False
    ) -> list[Instruction]:
        """Take in a worker; one that comes later begins at the clock `start`.

        Args:
            worker: Its number.
            start: Its first clock.
            life: Incarnation of its process.
            was_member: Whether this process has been a worker of the run before.

        Raises:
            StaleError: The process was removed.
        """
        self.check_worker(worker, life)
        known = None if self.directory is None else self.directory.lives.get(worker)
        if self.directory is not None and life != known:
            if was_member:  # removed by an earlier life of the scheduler
                self._removed[worker, life] = "it was lost for too long"
                self.check_worker(worker, life)
            if known is not None:
                self._removed[worker, known] = "another process has taken its place"
        self._lives[worker] = life
        self._vacant = [number for number in self._vacant if number != worker]
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
        """Take in a process that may take the place of a worker."""
        if spare not in self._spares:
            self._spares.append(spare)
        return self._call_spare(self._vacant.pop(0)) if self._vacant else []

    def spare_lost(self, spare: int) -> list[Instruction]:
        """Forget a spare, which was lost or has been called."""
        self._spares = [each for each in self._spares if each != spare]
        return []

    def worker_leaves(self, worker: int, life: int = 0) -> list[Instruction]:
        """Wait for a worker no longer, since it is done."""
        if life != self._lives.get(worker):
            return []  # another process has its place
        self._gone.add(worker)
        self.missing.discard(("worker", worker))
        return [*self._deal_again(worker), *self._remove(worker)]

    def worker_lost(self, worker: int, reason: str, life: int = 0) -> list[Instruction]:
        """Act on the loss of a worker's process as the policy says."""
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
        """Wait no longer for new processes of workers that were lost."""
        workers = [] if self.directory is None else list(self.directory.workers)
        lost = [number for number in workers if worker_node(number) not in self.addresses]
        return [each for number in lost for each in self._remove(number)]

    def server_leaves(self, server: int, request: tuple[str, int]) -> list[Instruction]:
        """Move a server's shards to others, then let it go.

        Raises:
            CommError: No server would be left.
        """
        if self.directory is None:
            msg = f"server {server} cannot leave before all servers and workers have joined"
            raise CommError(msg)
        if len(self.directory.servers) - len({*self.directory.leaving, server}) < 1:
            msg = f"server {server} cannot leave: it is the last one, and has all shards"
            raise CommError(msg)
        self._leaving[server] = request
        return self._change(self.directory.drained(server))

    def server_lost(self, server: int, reason: str) -> list[Instruction]:
        """Go on without a server, where its shards have copies."""
        directory = self.directory
        self.addresses.pop(
            server_node(server), None
        )  # it counts no longer, if not all have come yet
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
        """Record that a server that joins a chain has the state."""
        if self.directory is None:
            return []
        directory = self.directory.installed(shard, server, since)
        return [] if directory is self.directory else self._change(directory)

    def balance(self, server: int, counts: list[int]) -> list[Instruction]:
        """Take in the requests that a server had; move hot shards to servers with little load."""
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
        """Let all workers stop before a clock; the first one that is asked for holds."""
        self._stop = self._stop or clock
        return [StopWorkers(self._stop)]

    def barrier(
        self, name: str, node: str, request: int, members: frozenset[str], step: int = -1
    ) -> list[Instruction]:
        """Let a node wait at a barrier until all `members` have come.

        A barrier of a `step` cannot wait for the successor of a lost worker: it goes on at the
        clock of its tables, which may lie behind the step or before it. It passes the steps that
        were released without it, and is a member again from the first step that was not.
        """
        if step >= 0:
            if self._since.get(node) == math.inf:
                if step <= self._passed.get(name, -1):
                    return [ReleaseNodes(((node, request),))]
                self._since[node] = step
            members = frozenset(each for each in members if self._since.get(each, 0) <= step)
            at, name = (name, step), f"{name} {step}"
            self._steps[name] = at
        self._arrive(name, node, request, members)
        return self._released()

    def _released(self) -> list[Instruction]:
        """Release the barriers to which all have come that are still here."""
        out: list[Instruction] = []
        for name in self._reached:
            out.append(ReleaseNodes(tuple(self._close(name).items())))
            if name in self._steps:
                of, step = self._steps.pop(name)
                self._passed[of] = max(step, self._passed.get(of, -1))
        return out

    def next_data(
        self, name: str, num_shards: int, request: tuple[str, int], done: tuple[int, ...]
    ) -> list[Instruction]:
        """Deal out the next shard of samples.

        Raises:
            CommError: Workers divide the samples in different ways.
        """
        data = self._data.setdefault(name, DataState(num_shards))
        if data.num_shards != num_shards:
            msg = (
                f"{request[0]} divides {name!r} into {num_shards} shards, another worker into "
                f"{data.num_shards}: give all the same numbers of samples, size and epochs"
            )
            raise CommError(msg)
        return [*data.next(request[0], request, done)]

    def drop_missing(self) -> list[Instruction]:
        """Treat nodes of an earlier life of the scheduler that did not come back as lost."""
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
        """Return who has not joined, and for whom barriers wait, as text."""
        absent = ", ".join(self.absent).replace(":", " ")
        lines = [f"{absent} did not join"] if self.directory is None else []
        return lines + [
            f"{', '.join(sorted(self._lacks(name)))} did not come to barrier {name!r}"
            for name in self._arrived
        ]

    def awaited(self) -> frozenset[str]:
        """Return the nodes that have not joined, or have not come to a barrier."""
        if self.directory is None:
            return frozenset(self.absent)
        return frozenset().union(*map(self._lacks, self._arrived))

    # -- inside

    def _deal_again(self, worker: int) -> list[Instruction]:
        return [each for data in self._data.values() for each in data.lost(f"worker:{worker}")]

    def _begin(self) -> list[Instruction]:
        nodes = [(*split_node(node), address) for node, address in self.addresses.items()]
        servers = {number: address for role, number, address in nodes if role == "server"}
        workers = sorted(number for role, number, _ in nodes if role == "worker")
        if len(servers) < self._num_servers or len(workers) < self._num_workers:
            return []
        self.directory = Directory.begin(servers, workers, self._replicas, lives=self._lives)
        return [PublishDirectory(self.directory)]

    def _call_spare(self, worker: int) -> list[Instruction]:
        return [*self._vacate(worker), CallSpare(self._spares.pop(0), worker)]

    def _vacate(self, worker: int) -> list[Instruction]:
        """Let servers refuse the lost process of a worker until another one takes its place."""
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
        """Publish a directory with the copies and moves that it calls for."""
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
