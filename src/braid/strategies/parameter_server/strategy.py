"""ParameterServerStrategy: variables on servers, trained by workers at their own pace.

    strategy = ParameterServerStrategy()            each process runs the same program
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    every worker runs the loop (V1)                 or a coordinator hands out closures (V2)
    if strategy.serves:                             if not strategy.is_chief:
        strategy.serve()                                strategy.serve()
    else:                                           else:
        for x, y in batches:                            coordinator = ClusterCoordinator(strategy)
            strategy.run(step, (x, y))                  coordinator.schedule(step, (batches,))
        strategy.close()                                coordinator.join()

Training is asynchronous unless `consistency` is passed. `SyncReplicas(n)` is synchronous with
backup workers: a step is complete with the gradients of n workers, later gradients are dropped, and
a late worker continues at the current step.

Sources: M. Abadi et al., TensorFlow, OSDI 2016, section 4.4; J. Chen et al., Revisiting distributed
synchronous SGD, 2016; TensorFlow 2.21, `tf.distribute.ParameterServerStrategy`.
"""

from __future__ import annotations

import math
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from braid.comm import Group
from braid.errors import ConfigError, PeerLostError
from braid.ps import Consistency, Node, Options
from braid.ps.dense import MAX_SHARDS
from braid.ps.snapshots import write_tables
from braid.strategies.cluster import (
    ClusterResolver,
    LaunchedClusterResolver,
    resolver_of_tf_config,
)
from braid.strategies.contexts import ReplicaContext, entered, get_replica_context
from braid.strategies.made_in_scope import source_of
from braid.strategies.parameter_server.cluster_node import join_cluster
from braid.strategies.parameter_server.partitioners import Partitioner, rows_of_shards
from braid.strategies.parameter_server.sharded_variable import (
    Aggregation,
    ShardedVariable,
    variable_spec,
)
from braid.strategies.parameter_server.variables import ServerVariables
from braid.strategies.replicas import ThreadReplicas
from braid.strategies.strategy import Strategy

__all__ = ["ParameterServerStrategy", "SyncReplicas"]

ASYNCHRONOUS = Consistency(staleness=math.inf, aggregate="sum")
_OF_RANKS: weakref.WeakSet[ParameterServerStrategy] = weakref.WeakSet()  # that are not closed


def SyncReplicas(replicas_to_aggregate: int) -> Consistency:  # noqa: N802 - TensorFlow's name
    """Return the consistency of TensorFlow's SyncReplicasOptimizer.

    Args:
        replicas_to_aggregate: Number of workers that must push gradients to complete a step; the
            remaining workers are backups.
    """
    return Consistency(quorum=replicas_to_aggregate, late="drop")


def _refuse_second(made_at: str) -> None:
    """Raise ConfigError if the ranks of `braid run` have a strategy already."""
    for other in _OF_RANKS:
        msg = (
            f"the strategies made at {made_at} and {other.made_at} use the same ranks as "
            "servers, but a rank can serve only one: make all models in the scope of one, or "
            "close the first on all ranks before"
        )
        raise ConfigError(msg)


class ParameterServerStrategy(Strategy):
    """Strategy with variables on servers; the constructor joins the cluster.

    Attributes:
        has_coordinator: Whether a `ClusterCoordinator` uses the strategy.
        made_at: File and line of the program that made the strategy.

    Args:
        cluster_resolver: Resolver for the tasks. When None, TF_CONFIG if it is set, else the ranks
            of `braid run --servers N --workers M`.
        variable_partitioner: Function that returns the number of shards of each variable.
        consistency: When servers apply gradients and answer pulls; immediately when None.
        options: Options of the parameter server: copies of shards, lost workers, snapshots.

    Raises:
        ConfigError: The cluster has no server or no worker, TF_CONFIG is not valid, or the ranks of
            `braid run` have a strategy already that is not closed.
        RendezvousError: The scheduler task does not arrive in time.

    On failure: with `Options(replicas=1)` no update is lost if a server dies; else the run ends
    with a PeerLostError that names the server. `Options.on_worker_loss` decides what follows a lost
    worker. By default, tasks of TF_CONFIG continue, and a spare or a new process replaces the
    worker; ranks of `braid run` fail unless it has `--spares` or `--on-worker-loss`.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        consistency: Consistency | None = None,
        options: Options | None = None,
    ) -> None:
        cluster_resolver = cluster_resolver or resolver_of_tf_config()
        self._consistency = ASYNCHRONOUS if consistency is None else consistency
        self._partitioner = variable_partitioner
        self._variables: ServerVariables | None = None
        self._sharded: list[ShardedVariable] = []
        self._replica: ReplicaContext | None = None  # once a function has run
        self.has_coordinator = False
        caller = traceback.extract_stack(limit=2)[0]
        self.made_at = f"{Path(caller.filename).name}:{caller.lineno}"
        if cluster_resolver is None:
            _refuse_second(self.made_at)
        self._restore = None if options is None else options.restore
        if options is not None:
            options = replace(options, restore=None)  # snapshots are of variables, not of tables
        self._node, self._beside = join_cluster(cluster_resolver, options)
        super().__init__(
            ThreadReplicas([torch.device("cpu")]), cluster_resolver or LaunchedClusterResolver()
        )
        if cluster_resolver is None:
            _OF_RANKS.add(self)

    @property
    def node(self) -> Node:
        """Node of this process in the parameter server."""
        return self._node

    @property
    def is_chief(self) -> bool:
        """Whether this process may coordinate: it is the chief task, or rank 0 of `braid run`."""
        return self._node.is_scheduler

    @property
    def needs_all(self) -> str:
        """Feature that makes an asynchronous strategy wait for several workers; empty for none."""
        if self._consistency.quorum is not None:
            return f"steps of {self._consistency.quorum} workers (SyncReplicas)"
        combined = [v.name for v in self._sharded if v.is_combined]
        return "" if self.is_synchronous or not combined else f"variable {combined[0]!r}"

    @property
    def is_synchronous(self) -> bool:
        """Whether each step needs the gradients of all workers."""
        return self._consistency.by_clock and self._consistency.quorum is None

    @property
    def serves(self) -> bool:
        """Whether this process is not a worker and therefore calls `serve`."""
        return not self._node.is_worker

    @property
    def variables(self) -> ServerVariables:
        """The variables on servers; no module or optimizer may be made in the scope afterwards.

        Raises:
            ConfigError: An optimizer has parameters that were not made in the scope.
        """
        if self._variables is None:
            self._made.check(1)
            modules = self._made.modules()
            self._variables = ServerVariables(
                self._node,
                modules,
                self._made.optimizers(),
                self._consistency,
                partitioner=self._partitioner,
                restore=self._restore,
                sharded=self._sharded,
            )
        return self._variables

    def variable(
        self, name: str, initial: torch.Tensor, aggregation: Aggregation = "none"
    ) -> ShardedVariable:
        """Return a variable on servers that the program reads and changes itself.

        All processes declare the same variables, before the first step.

        Args:
            name: Name of the variable.
            initial: First value.
            aggregation: `none` to carry out each change as it comes; `mean` or `sum` of the changes
                of all workers.

        Raises:
            ConfigError: A variable of this name exists, or training has begun.
        """
        if self._variables is not None:
            msg = (
                f"variable {name!r} was declared after the first step: declare it before, on all "
                "processes"
            )
            raise ConfigError(msg)
        shape = initial.shape
        rows = rows_of_shards(self._partitioner, shape, initial.dtype, MAX_SHARDS)
        place = sum(variable.num_shards for variable in self._sharded)
        spec = variable_spec(
            name, initial, rows, aggregation, place=place, has_first=self._node.is_server
        )
        make = partial(ShardedVariable, shape=shape, dtype=initial.dtype)
        variable = self._node.declare(spec, make, restore=self._restore)
        self._sharded.append(variable)
        return variable

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Pull the variables, then call a function of one step in this worker.

        Args:
            fn: Function of one step; steps of optimizers made in the scope push gradients.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            The result of the function.

        Raises:
            ConfigError: This process is not a worker.
            PeerLostError: The run cannot go on.
        """
        if self.serves:
            msg = f"{self._node.name} is not a worker: call strategy.serve() there"
            raise ConfigError(msg)
        if get_replica_context() is not None:  # in a closure
            return fn(*args, **(kwargs or {}))
        if not self.variables.is_fresh:
            self.pull()
        if self._replica is None or source_of(fn) not in self._checked:
            return super().run(fn, args, kwargs)
        with entered(self, self._replica):  # there are no replicas to compare
            return fn(*args, **(kwargs or {}))

    @contextmanager
    def _in_replica(self, index: int, group: Group, part: float, *, is_new: bool) -> Iterator[None]:
        with super()._in_replica(index, group, part, is_new=is_new):
            self._replica = get_replica_context()
            yield

    def resume(self) -> int:
        """Return the number of steps that this worker has pushed, also in earlier processes.

        A restarted worker begins with the step of this number.
        """
        return self.variables.resume()

    def pull(self) -> None:
        """Copy the values of servers into this worker's modules.

        In a synchronous strategy this waits until the previous step is complete. A worker that was
        too late for that step, as a backup worker, continues at the current step.
        """
        self.variables.pull()

    def save(
        self,
        directory: str | os.PathLike[str],
        step: int,
        *,
        state: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> None:
        """Write a snapshot of all variables; all workers call it, the first one writes.

        `Options(restore=directory)` loads the snapshot on any number of servers, however variables
        are divided.

        Args:
            directory: Directory of checkpoints.
            step: Number of completed steps.
            state: Further values other than tensors, which must be JSON-serializable.
            keep: Number of snapshots to keep, this one included; all when None.

        Raises:
            CheckpointError: The snapshot cannot be written; earlier ones are untouched.
        """
        self.variables.wait()
        self._node.barrier(f"before snapshot {step}")
        if self._node.number == min(self._node.workers):
            states = self.variables.export()
            extra = self.variables.model_tensors(states)
            write_tables(directory, states, step, extra=extra, state=state, keep=keep)
        self._node.barrier(f"after snapshot {step}")

    def serve(self) -> None:
        """Answer requests until the run is over; for servers, and for workers that run closures.

        Raises:
            PeerLostError: The run cannot go on.
        """
        _ = self.variables  # declares the tables
        beside = threading.Thread(target=self._schedule_beside, name="scheduler", daemon=True)
        beside.start()
        try:
            if self._node.is_worker:
                from braid.strategies.coordinator.closures import serve_closures  # noqa: PLC0415

                serve_closures(self)
            else:
                self._node.serve()
        except PeerLostError:
            beside.join()  # it informs the nodes that come late
            raise
        self.close()

    def _schedule_beside(self) -> None:
        """Run the scheduler of this process, if it has one beside its node."""
        if self._beside is not None:
            with suppress(PeerLostError):  # the node raises it, too
                self._beside.serve()

    def close(self) -> None:
        """Leave the cluster, once servers have accepted all pushes of this process. Idempotent."""
        super().close()
        self._node.close()
        _OF_RANKS.discard(self)
        if self._beside is not None:
            self._beside.close()
