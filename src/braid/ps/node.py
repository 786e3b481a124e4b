"""A node of a parameter server: the scheduler, a server or a worker, and its tables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from braid.errors import BraidError, CheckpointError, ConfigError
from braid.ps.base_node import BaseNode
from braid.ps.consistency import BSP, Consistency
from braid.ps.customer import Customer, ask_scheduler, dealt_ranges
from braid.ps.dense import DenseTable, dense_spec
from braid.ps.messages import Barrier, Pulled, StopAt, check_type
from braid.ps.postoffice import Postoffice
from braid.ps.protocol.directory import SCHEDULER, Role, worker_node
from braid.ps.scheduler import Options, Scheduler
from braid.ps.server import Server
from braid.ps.service import end_if_left_behind, schedule, serve
from braid.ps.snapshots import read_table, write_tables
from braid.ps.sparse import SparseTable, sparse_spec
from braid.ps.storage import Admission, Eviction, Init, Rule, State, split_state
from braid.ps.storage.steppers import MakeOptimizer
from braid.ps.table import Table, TableSpec
from braid.runtime.events import Recorder
from braid.runtime.message import Van

__all__ = ["Node"]

AnyTable = TypeVar("AnyTable", bound=Table)


class Node(BaseNode):
    """A process of a parameter server: the scheduler, a server or a worker, with its tables.

    Args:
        van: Connections of the node to other nodes; owned and closed by this object.
        role: Role of the node.
        number: Number of this server, or of this worker.
        counts: Number of servers and of workers at the beginning.
        scheduler: Address of the scheduler.
        options: Options of the whole parameter server.
        start: First clock of a worker that joins a running job.
        resend_s: Seconds after which unanswered messages are sent again, on links that lose some.
        events: Recorder of waits and pushes; a private one when None.
        ranks: Rank of each node, for reports of waits.
        has_ended: Returns whether the scheduler's process has ended without an error, as far as
            the launcher knows; a server without a link to other nodes then exits as well.
    """

    def __init__(
        self,
        van: Van,
        role: Role,
        number: int,
        counts: tuple[int, int],
        scheduler: str,
        options: Options | None = None,
        *,
        start: int = 0,
        resend_s: float | None = None,
        events: Recorder | None = None,
        has_ended: Callable[[], bool] = lambda: False,
        ranks: Mapping[str, int] = {},
    ) -> None:
        options = options or Options()
        postoffice = Postoffice(
            van,
            "" if role == "scheduler" else scheduler,
            start=start,
            resend_s=resend_s,
            events=events,
            ranks=ranks,
        )
        super().__init__(postoffice, role, number, counts)
        self._options = options
        self._has_ended = has_ended
        self._tables: list[Table] = []
        self._scheduler: Scheduler | None = None
        self._server: Server | None = None
        self._customer: Customer | None = None
        self._is_released = False
        if role == "scheduler":
            try:
                self._scheduler = Scheduler(self.postoffice, counts, options)
            except ConfigError:
                van.close(0.0)
                raise
        elif role == "server":
            self._server = Server(self.postoffice, number, options.rebalance_s)
        elif role == "worker":
            self._customer = Customer(self.postoffice)
            self.postoffice.receive_into(Pulled)
            self.postoffice.register({}, on_tick=partial(end_if_left_behind, self.postoffice))

    @property
    def address(self) -> str:
        """Address at which other nodes reach this one; empty for workers."""
        return self.postoffice.van.address

    @property
    def server(self) -> Server | None:
        """The server object of this node; None on other nodes."""
        return self._server

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler object of this node; None on other nodes."""
        return self._scheduler

    def dense(
        self,
        name: str,
        values: torch.Tensor,
        optimizer: Rule | MakeOptimizer | None,
        consistency: Consistency = BSP,
        *,
        sizes: Sequence[int] = (),
        lengths: Sequence[int] = (),
        place: int | None = None,
        state: State | None = None,
    ) -> DenseTable:
        """Declare a dense table; all nodes declare the same tables.

        Args:
            name: Name of the table.
            values: Initial values; each server stores its shards of them.
            optimizer: Rule, or function of parameters that returns an elementwise optimizer, such
                as `partial(torch.optim.SGD, lr=0.1)`; servers step it. When None, servers only sum
                gradients, and a pull returns the sum of the last clock.
            consistency: When pushes are applied, and pulls answered.
            sizes: Lengths of the parameters in `values`, if pushes may lack the gradients of some;
                servers step each parameter separately.
            lengths: Number of elements of each shard; shards of about 1 MiB when empty.
            place: Number of the server, modulo the number of servers, that first has shard 0;
                shard 1 is on the next server, and so on. Depends on the table's name when None.
            state: Exported state to begin with, on servers; `Options.restore` when None.

        Raises:
            ConfigError: A table of this name exists, the values are not floating-point, the
                optimizer needs a whole parameter, the quorum exceeds the number of workers, the
                `sizes` do not add up to the values, or `sizes` come without an optimizer.
        """
        spec = dense_spec(
            name,
            values,
            optimizer,
            consistency,
            sizes,
            lengths=lengths,
            place=place,
            has_first=self.is_server,
        )
        return self.declare(spec, partial(DenseTable, like=values), state)

    def sparse(
        self,
        name: str,
        dim: int,
        rule: Rule,
        consistency: Consistency = BSP,
        *,
        init: Init | torch.Tensor | None = None,
        seed: int = 0,
        num_shards: int = 16,
        admit: Admission | None = None,
        evict: Eviction | None = None,
        dtype: torch.dtype = torch.float32,
        restore: Path | None = None,
    ) -> SparseTable:
        """Declare a sparse table, with one row per id; all nodes declare the same tables.

        Args:
            name: Name of the table.
            dim: Number of elements of a row.
            rule: Optimizer of the rows, such as `ps.Adagrad(lr=0.1)`; servers step it.
            consistency: When pushes are applied, and pulls answered.
            init: Distribution of initial rows, or the rows themselves, of shape [number of ids,
                dim]; normal with standard deviation 0.01 when None.
            seed: Seed of initial rows.
            num_shards: Number of shards.
            admit: Condition on which an id gets a row; with its first push when None.
            evict: Condition on which rows are removed; never when None.
            dtype: Dtype of rows and gradients.
            restore: Snapshot to begin with; `Options.restore` when None.

        Raises:
            ConfigError: A table of this name exists, or an argument is out of range.
        """
        spec = sparse_spec(
            name,
            dim,
            rule,
            consistency,
            init=init,
            seed=seed,
            num_shards=num_shards,
            admit=admit,
            evict=evict,
            dtype=dtype,
            has_first=self.is_server,
        )
        return self.declare(spec, partial(SparseTable, dim=dim, dtype=dtype), restore=restore)

    def save(
        self,
        directory: str | os.PathLike[str],
        step: int,
        *,
        extra: Mapping[str, torch.Tensor] | None = None,
        state: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> None:
        """Write a snapshot of all tables; all workers call it, the first one writes.

        It includes all earlier pushes. `Options(restore=...)` loads it on any number of servers.

        Args:
            directory: Directory of checkpoints.
            step: Number of completed steps.
            extra: Further tensors to write, such as `braid.checkpoint.training_tensors(model)`.
            state: Further values other than tensors, which must be JSON-serializable.
            keep: Number of snapshots to keep, this one included; all when None.

        Raises:
            ConfigError: This node is not a worker.
            CheckpointError: The snapshot cannot be written; earlier ones are untouched. Only the
                first worker raises this.

        On failure: if a worker dies in this call, the others continue. If the first worker dies,
            this step has a snapshot only if its replacement repeats the step.
        """
        if self._customer is None:
            msg = "only workers can save snapshots: call serve() on servers"
            raise ConfigError(msg)
        self._customer.wait_all()
        self._barrier("before a snapshot", step=step)
        try:
            if self.number == self.workers[0]:
                states = {table.name: table.export() for table in self._tables}
                write_tables(directory, states, step, extra=extra, state=state, keep=keep)
        except CheckpointError as exc:
            msg = f"worker {self.number}: {exc}"
            raise CheckpointError(msg) from exc
        finally:
            self._barrier("after a snapshot", step=step)

    def declare(
        self,
        spec: TableSpec,
        make: Callable[[Customer | None, TableSpec], AnyTable],
        state: State | None = None,
        restore: Path | None = None,
    ) -> AnyTable:
        """Declare a table of any kind; all nodes must declare the same tables.

        Args:
            spec: Spec of the table.
            make: Called as `make(customer, spec)`; returns the table object. The customer sends a
                worker's requests; it is None on servers and the scheduler.
            state: Exported state to begin with, on servers.
            restore: Snapshot to begin with; `Options.restore` when None.

        Raises:
            ConfigError: A table of this name exists, or fewer workers than the quorum exist.
        """
        if spec.name in self.postoffice.tables:
            msg = f"a table named {spec.name!r} already exists: choose another name"
            raise ConfigError(msg)
        if not spec.name or "/" in spec.name:
            msg = f"a table's name must not be empty or contain a slash, got {spec.name!r}"
            raise ConfigError(msg)
        quorum = spec.consistency.quorum
        if quorum is not None and quorum > self.num_workers:
            msg = f"quorum {quorum} exceeds the {self.num_workers} workers: choose a smaller quorum"
            raise ConfigError(msg)
        self.postoffice.tables[spec.name] = spec.form, spec.first
        if self._server is not None:
            where, states = restore or self._options.restore, None
            if state is not None:
                states = split_state(state, spec.num_shards, spec.lengths)
            elif where is not None:
                states = read_table(where, spec.name, spec.num_shards, spec.lengths)
            self._server.add(spec, states)
        table = make(self._customer, spec)
        self._tables.append(table)
        return table

    def serve(self) -> None:
        """Run this server or scheduler until all workers have left; on a spare return immediately.

        A server that is cut off from all other nodes joins again when its network is back. It
        returns if the scheduler has ended without an error (one that replaces another server also
        before it has joined), and with a warning after 300 s alone; without replicas it raises.

        Raises:
            ConfigError: This node is a worker.
            PeerLostError: The run cannot go on; names the lost node, and the nodes that wait for
                it.
        """
        if self.is_worker:
            msg = f"this rank is worker {self.number}: call serve() unless node.is_worker"
            raise ConfigError(msg)
        if self._scheduler is not None:
            schedule(self.postoffice, self._scheduler)
        elif self._server is not None:  # else a spare that was not called, and the run is over
            serve(
                self.postoffice,
                self._server,
                self._has_ended,
                is_late=self.number >= self.num_servers,  # others wait for a server of the first
                has_copies=bool(self._options.replicas),
            )

    def resume(self) -> int:
        """Continue at the clock of this worker's lost process; call after declaring all tables.

        For programs that push all tables once in each step. The clock is the least one over all
        shards: if some shards have its push already, they accept it again without applying it.

        Returns:
            The clock at which all tables continue, which is the number of the first step.

        Raises:
            ConfigError: This node is not a worker, or no table is declared.
            CommError: This worker has been removed from the run.
        """
        if self._customer is None or not self._tables:
            msg = "only workers with tables can resume: call resume() after declaring tables"
            raise ConfigError(msg)
        clock = min(table.fetch_clock() for table in self._tables)
        for table in self._tables:
            table.clock = clock
        return clock

    def barrier(self, name: str = "workers", timeout_s: float | None = None) -> None:
        """Wait until all workers have entered the barrier of this name.

        Raises:
            ConfigError: This node is not a worker, or the name is not a string.
            CommTimeout: Some workers have not entered it.
        """
        if self._customer is None:
            msg = "only workers can enter barriers: call barrier() on workers"
            raise ConfigError(msg)
        check_type("the name of a barrier must be a text", name, str)
        self._barrier(name, timeout_s)

    def _barrier(self, name: str, timeout_s: float | None = None, *, step: int = -1) -> None:
        assert self._customer is not None, "only workers enter barriers"
        self.postoffice.ensure_joined()
        members = tuple(map(worker_node, self.workers))
        ask_scheduler(self._customer, Barrier(name, members, step), timeout_s=timeout_s)

    @property
    def workers(self) -> list[int]:
        """Numbers of the workers that take part in the run now."""
        assert self.postoffice.directory is not None, "a node has a directory once it has joined"
        return sorted(self.postoffice.directory.workers)

    def samples(
        self, name: str, num_samples: int, *, shard_size: int, epochs: int = 1
    ) -> Iterator[range]:
        """Yield ranges of samples until all workers together have finished all of them.

        The unfinished range of a lost worker goes to another one. A range counts as finished when
        the loop requests the next one: finish its pushes before.

        Args:
            name: Name of the samples, the same on all workers.
            num_samples: Number of samples.
            shard_size: Number of samples in a range.
            epochs: Number of times that each sample is dealt out.

        Raises:
            ConfigError: This node is not a worker, a number is less than 1, or the name is not a
                string.
            PeerLostError: The run cannot go on.
        """
        if self._customer is None:
            msg = "only workers can train on samples: call samples() on workers"
            raise ConfigError(msg)
        self.postoffice.ensure_joined()
        return dealt_ranges(self._customer, name, num_samples, shard_size, epochs)

    def request_stop(self, clock: int) -> None:
        """Ask all workers to stop before a clock; `stop_at` then returns the clock to stop at.

        For early stopping: if one worker just stopped, the others would wait for its pushes.

        Args:
            clock: A clock that no worker has finished: this worker's, plus the staleness, plus two.
        """
        self.postoffice.send(SCHEDULER, StopAt(clock))

    @property
    def stop_at(self) -> int | None:
        """Clock before which all workers stop; None until a worker has called `request_stop`."""
        return self.postoffice.stop_at

    def drain(self) -> None:
        """Move this server's shards to other servers, after which `serve` returns. Thread-safe.

        Raises:
            ConfigError: This node is not a server.
        """
        if self._server is None:
            msg = "only servers can drain: call close() to end a worker"
            raise ConfigError(msg)
        self._server.drain()

    def close(self) -> None:
        """Leave the run, after all pushes of this worker are accepted. Idempotent.

        A worker that has not sent any request joins first, since a run begins when all have joined.

        Raises:
            CommError: A push was refused.
            RendezvousError: The worker had not joined, and the scheduler cannot be reached.
        """
        try:
            if self._customer is not None and not self._is_released:
                self._is_released = True
                try:
                    self.postoffice.ensure_joined()
                    self._customer.wait_all()
                finally:
                    self.postoffice.leave()
        finally:
            self.postoffice.close()

    def abort(self, reason: str = "") -> None:
        """Leave immediately, and send the reason to the scheduler."""
        self._is_released = True
        self.postoffice.leave(reason)
        with contextlib.suppress(BraidError):
            self.postoffice.close(0.0)
