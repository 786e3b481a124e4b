"""A whole parameter server in a simulated network: real servers, scheduler and workers, one thread.

Each worker pulls, computes, pushes, for a number of clocks. Time is virtual, and all faults follow
from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch

from braid.errors import StaleError
from braid.ps import Consistency, Node, Options
from braid.ps.messages import SCHEMA, Called
from braid.ps.protocol.directory import name_of, virtual_shard
from braid.ps.protocol.shard_state import TaskKey
from braid.runtime.message import Delivery, VanConfig
from support.message_faults import Faults
from support.simulated_van import Network

NUMEL = 6
TICK_S = 0.05
CONFIG = VanConfig(heartbeat_s=0.2, lost_after_s=2.0)
Gradient = Callable[[torch.Tensor, int, int], torch.Tensor]


class Worker:
    """A worker that pulls, computes and pushes, driven by what arrives."""

    def __init__(self, node: Node, tables: list[object], gradient: Gradient, clocks: int) -> None:
        self.node, self.gradient, self.clocks = node, gradient, clocks
        self.table, *self.others = tables  # the others are pushed and pulled, and not looked at
        self.pulled: list[torch.Tensor] = []
        self.stamps: list[int] = []
        self.values = torch.zeros(NUMEL)
        self._pull: int | None = None
        self.is_removed = False
        self.runs_tasks = False  # of which each worker runs all, with the numbers of the clocks

    @property
    def accepted(self) -> list[int]:
        """Clocks of the pushes of this process that were accepted."""
        customer = self.table._own_customer
        first = self.table.clock - len(self.stamps)
        return [
            first + place
            for place, stamp in enumerate(self.stamps)
            if customer.is_done(stamp) and not customer.has_failed(stamp)
        ]

    @property
    def is_done(self) -> bool:
        customer = self.table._own_customer
        return len(self.pulled) > self.clocks and all(map(customer.is_done, self.stamps))

    def go_on(self) -> None:
        """Continue when the pull under way is answered."""
        try:
            self.node.postoffice.raise_failure()
            if self.node.postoffice.directory is not None:
                self._go_on()
        except StaleError:
            self.is_removed = True

    def _go_on(self) -> None:
        customer = self.table._own_customer
        if self._pull is not None:
            if not customer.is_done(self._pull):
                return
            self._pull = None
            self.pulled.append(self.values.clone())
            clock = self.table.clock
            if clock < self.clocks:
                grad = self.gradient(self.values.clone(), self.node.number, clock)
                if self.runs_tasks:
                    self.table.task = TaskKey(clock, 0, max(0, clock - 2))
                self.stamps.append(self.table.push_async(grad))
                for other in self.others:
                    self.stamps += [other.push_async(grad), other.pull_async(torch.zeros(NUMEL))]
        if len(self.pulled) <= self.clocks:
            self._pull = self.table.pull_async(self.values)


class Simulation:
    """Nodes, their network, and the end of the run."""

    def __init__(
        self,
        seed: int,
        *,
        servers: int = 2,
        workers: int = 2,
        clocks: int = 6,
        consistency: Consistency,
        optimizer: object,
        gradient: Gradient,
        options: Options | None = None,
        faults: Faults | None = None,
        num_tables: int = 1,
        used: int = 1,
        runs_tasks: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.network = Network(SCHEMA, seed=seed, faults=faults, config=CONFIG)
        self.counts = servers, workers
        self.consistency, self.optimizer = consistency, optimizer
        self.gradient, self.clocks = gradient, clocks
        # Heartbeats are lost, too, so that workers seem to be gone that are not.
        self.options = options or Options(on_worker_loss="wait")
        self.nodes: dict[str, Node] = {}
        self.workers: dict[int, Worker] = {}
        self.processes: list[Worker] = []  # of all workers, those too that others have replaced
        self.num_tables, self.used = num_tables, used
        self.runs_tasks = runs_tasks
        self.start("scheduler", 0)
        for number in range(servers):
            self.start("server", number)
        for number in range(workers):
            self.start("worker", number)

    def start(self, role: str, number: int, start: int = 0) -> Node:
        """Start a node, or start it again after a crash."""
        name = name_of(role, number)

        def handler(van: object, delivery: object) -> None:
            del van
            self.nodes[name].postoffice.poll(delivery)
            self._go_on(name)

        van = self.network.join(name, handler)
        node = Node(
            van, role, number, self.counts, "-", self.options, start=start, resend_s=4 * TICK_S
        )
        self.nodes[name] = node
        tables = [
            node.dense(f"w{place}", torch.zeros(NUMEL), self.optimizer, self.consistency)
            for place in range(self.num_tables)
        ]
        if role == "worker":
            self.workers[number] = Worker(node, tables[: self.used], self.gradient, self.clocks)
            self.workers[number].table.clock = start
            self.workers[number].runs_tasks = self.runs_tasks
            self.processes.append(self.workers[number])
        self._tick(name, node)
        return node

    def start_spare(self) -> list[int]:
        """Start a spare; return the list of workers in whose place it is called."""
        calls: list[int] = []

        def handler(van: object, delivery: Delivery) -> None:
            del van
            office.poll(delivery)

        van = self.network.join("spare:0", handler)
        office = Node(van, "spare", 0, self.counts, "-", self.options).postoffice
        office.register({Called: lambda delivery: calls.append(delivery.message.worker)})
        office.announce()
        return calls

    def clock_of(self, worker: int) -> int:
        """Return the clock at which a process that replaces a worker goes on."""
        directory = self.nodes["scheduler"].postoffice.directory
        return min(
            shard.state.clock(worker)
            for node in self.nodes.values()
            if node.server is not None
            for shard in node.server.shards
            if directory.head(shard.virtual) == node.number
        )

    def is_vacant(self, worker: int) -> bool:
        """Return whether a worker has lost its process, and waits for the spare that was called."""
        directory = self.nodes["scheduler"].postoffice.directory
        return worker in directory.workers and worker not in directory.lives

    def begin(self, extra_s: float) -> None:
        """Let time pass until all have joined, and a little more."""
        scheduler = self.nodes["scheduler"].postoffice
        self.network.run_until(lambda: scheduler.directory is not None)
        self.network.run_for(extra_s)

    def crash(self, name: str, *, silent: bool = False) -> None:
        """Let a node end at once."""
        del self.nodes[name]
        self.network.crash(name, silent=silent)

    def run(self, timeout_s: float = 120.0) -> None:
        """Let time pass until all workers are done."""
        self.network.run_until(
            lambda: all(each.is_done or each.is_removed for each in self.workers.values()),
            timeout_s,
        )

    def values(self, table: str = "w0") -> torch.Tensor:
        """Return the values of the heads."""
        directory = self.nodes["scheduler"].postoffice.directory
        for node in self.nodes.values():
            if node.server is None:
                continue
            for shard in node.server.shards:
                if shard.table == table and directory.head(shard.virtual) == node.number:
                    return shard.storage.read(())[0].clone()
        msg = "no server has the table"
        raise AssertionError(msg)

    def heads(self) -> list[int]:
        """Return the head of each table."""
        directory = self.nodes["scheduler"].postoffice.directory
        return [directory.head(virtual_shard(f"w{k}", 0)) for k in range(self.num_tables)]

    def _tick(self, name: str, node: Node) -> None:
        if self.nodes.get(name) is not node:
            return
        if self.network.is_stopped(name):
            self.network.call_later(TICK_S, partial(self._tick, name, node))
            return
        if node.role != "scheduler" and node.postoffice.directory is None:
            node.postoffice.announce()
        node.postoffice.poll()
        self._go_on(name)
        self.network.call_later(TICK_S, partial(self._tick, name, node))

    def _go_on(self, name: str) -> None:
        node = self.nodes.get(name)
        if node is not None and node.role == "worker":
            self.workers[node.number].go_on()
