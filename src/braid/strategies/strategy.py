"""Strategy: distributes a training over replicas without changes to its step function.

    strategy = MirroredStrategy(["cpu", "cpu"])       one line decides
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):                                   the loop is torch's
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()                              gradients have been averaged
        return loss

    for batch in strategy.experimental_distribute_dataset(loader):
        losses = strategy.run(step, args=batch)
        print(strategy.reduce("mean", losses))

Gradients are averaged over replicas during backward, weighted by samples if shares differ, and
summed in the order of replicas. So all strategies with the same number of replicas end with the
same weights.

Source of the names: TensorFlow 2.21, `tf.distribute.Strategy`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.data_parallel import AveragingOptimizer
from braid.strategies.agreement import average_closure
from braid.strategies.cluster import ClusterResolver
from braid.strategies.contexts import ReplicaContext, checked_op, entered, get_replica_context
from braid.strategies.copies import ReplicaCopies
from braid.strategies.datasets import DistributedDataset, InputContext, from_function
from braid.strategies.extended import StrategyExtended
from braid.strategies.made_in_scope import (
    MadeInScope,
    ParameterCheck,
    shared_objects_refused,
    source_of,
)
from braid.strategies.replica_objects import ReplicaObjects
from braid.strategies.replicas import LocalReplicas, merged
from braid.strategies.values import (
    PerReplica,
    SyncOnRead,
    map_leaves,
    of_replica,
    per_replica,
    shares_in,
)

__all__ = ["Strategy", "compute_average_loss"]


class Strategy:
    """Base class of strategies such as MirroredStrategy.

    Args:
        replicas: The replicas of this process.
        cluster_resolver: Resolver for the processes, if there are several.
        bucket_cap_mb: Called with the bytes of all parameters; returns the MiB of a bucket of
            gradients, or None for braid's sizes.

    Raises:
        ConfigError: This statement is in another strategy's scope.
    """

    def __init__(
        self,
        replicas: LocalReplicas,
        cluster_resolver: ClusterResolver | None = None,
        bucket_cap_mb: Callable[[int], float | None] = lambda _: None,
    ) -> None:
        with entered(self):
            pass
        self._replicas = replicas
        self._bucket_cap_mb = bucket_cap_mb
        self._is_running = False
        self._made = MadeInScope(self._copy_of)
        self._copies = ReplicaCopies(self._made, replicas, self._average_gradients)
        self._checked: set[object] = set()
        # ends threads and frees memory with the strategy, also without close()
        self._ends = weakref.finalize(self, replicas.close)
        self.cluster_resolver = cluster_resolver
        self.extended = StrategyExtended(self)

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in all processes; gradients are averaged over them."""
        return self._replicas.size

    @property
    def across(self) -> Group | None:
        """Group of the processes; None with a single process."""
        return self._replicas.across

    @property
    def devices(self) -> Sequence[torch.device]:
        """Devices of the replicas of this process."""
        return self._replicas.devices

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Distribute the modules and optimizers that are made in the block.

        Raises:
            ConfigError: Another strategy's scope is entered, or a replica enters it.
        """
        if get_replica_context() is not None:
            msg = "strategy.scope was entered in strategy.run: make models and optimizers before"
            raise ConfigError(msg)
        with entered(self), self._made.tracked():
            yield self

    def adopt(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Distribute a model and an optimizer as if they had been made in the scope."""
        self._made.add([*model.modules(), optimizer])

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function in each replica.

        Args:
            fn: Function of one step. In it, objects made in the scope are the replica's copies.
            args: Arguments; a `PerReplica` among them passes each replica its value.
            kwargs: Keyword arguments, with the same rule.

        Returns:
            The result of the replica; a `PerReplica` if this process has several replicas.

        Raises:
            ConfigError: A replica or a `merge_call` calls this method; or the function uses
                parameters that were not made in the scope.
            Exception: The exception of the replica that failed first.
        """
        if get_replica_context() is not None or self._is_running:
            msg = "strategy.run was called inside strategy.run: call the function directly"
            raise ConfigError(msg)
        self._is_running = True
        try:
            return self._run(fn, args, dict(kwargs or {}))
        finally:
            self._is_running = False

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._copies.begin_step()
        shares = shares_in([args, kwargs], self.num_replicas_in_sync)
        code = source_of(fn)
        is_new = code not in self._checked

        def call(index: int, group: Group) -> Any:
            part = 1 / group.size if shares is None else shares[group.rank]
            with self._in_replica(index, group, part, is_new=is_new):
                result = fn(*of_replica(args, index), **of_replica(kwargs, index))
            self._replicas.end_step(index)
            return result

        with ExitStack() as stack:
            if is_new:
                hook = register_optimizer_step_pre_hook(self._check_optimizer)
                stack.callback(hook.remove)
            if len(self.devices) > 1:
                stack.enter_context(shared_objects_refused())
            try:
                results = self._replicas.run(call)
                self._copies.end_step()
            except BaseException:
                self._copies.forget()
                raise
        self._checked.add(code)
        if not self._replicas.is_usable:
            self._copies.forget()
            self._replicas.close()
        return per_replica(results)

    def reduce(self, op: str, value: Any, axis: int | None = None) -> Any:
        """Combine the values of all replicas.

        Args:
            op: `sum` or `mean`.
            value: Result of `run`: a tensor or a number of each replica, or a tuple, list or
                mapping of them.
            axis: Dim along which each tensor is combined as well. A mean is then the mean of all
                elements, even if replicas have different numbers of elements.

        Raises:
            ConfigError: `op` is neither `sum` nor `mean`, or values have different shapes.

        Cost: an all-reduce if there are several processes; all of them call it.
        """
        op = checked_op(op)
        return map_leaves(value, lambda leaf: self._combined(op, leaf, axis))

    def _combined(self, op: str, value: Any, axis: int | None) -> torch.Tensor:
        parts = [_number(part) for part in self.experimental_local_results(value)]
        counts = [1 if axis is None else part.shape[axis] for part in parts]
        if axis is not None:
            parts = [part.sum(axis) for part in parts]
        if len({part.shape for part in parts}) > 1:
            shapes = [list(part.shape) for part in parts]
            msg = f"values of replicas have different shapes {shapes}: pass axis=0, or gather them"
            raise ConfigError(msg)
        total = parts[0].clone()
        for part in parts[1:]:
            total = total + part.to(total.device)
        count = torch.tensor(float(sum(counts)), dtype=torch.float64)
        if self._replicas.across is not None:
            total = self._replicas.across.all_reduce(total)
            count = self._replicas.across.all_reduce(count)
        return total if op == "sum" else total / count.item()

    def gather(self, value: Any, axis: int) -> torch.Tensor:
        """Return the tensors of all replicas, concatenated along `axis`, where sizes may differ.

        Cost: two all-gathers if there are several processes; all of them call it.
        """
        parts = [torch.as_tensor(part).detach() for part in self.experimental_local_results(value)]
        here = torch.cat([part.to(parts[0].device) for part in parts], axis)
        across = self._replicas.across
        if across is None:
            return here
        rows = here.movedim(axis, 0).contiguous()
        sizes = across.all_gather(torch.tensor([rows.shape[0]])).tolist()
        outs = [rows.new_empty((size, *rows.shape[1:])) for size in sizes]
        return torch.cat(across.all_gather(rows, out=outs)).movedim(0, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas."""
        if isinstance(value, (PerReplica, SyncOnRead)):
            return value.values
        return (value,) * len(self.devices)

    def experimental_distribute_dataset(self, dataset: Iterable[Any]) -> DistributedDataset:
        """Cut each batch of a data set into shares, one for each replica.

        Every process reads all batches and keeps its own shares; see
        `distribute_datasets_from_function` to read only a part.

        Args:
            dataset: Batches of all replicas together, such as a `DataLoader`; equal in all
                processes.
        """
        return DistributedDataset(self._replicas, dataset, is_global=True)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]]
    ) -> DistributedDataset:
        """Make a data set from a function that each process calls for its replicas' batches.

        Args:
            dataset_fn: Function of an `InputContext`, which names the part to read. A batch goes to
                one replica. Last batches that are too few for this process's replicas are dropped.
        """
        return from_function(self._replicas, dataset_fn)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[int], Any]
    ) -> PerReplica:
        """Call `value_fn(number)` for each replica of this process, and return the results."""
        first = 0 if self._replicas.across is None else self._replicas.across.rank
        return PerReplica([value_fn(first + i) for i in range(len(self.devices))])

    def sync_on_read(self, initial: torch.Tensor | float, aggregation: str = "sum") -> SyncOnRead:
        """Return a value that each replica changes by itself on its device, such as a metric."""
        return SyncOnRead(initial, self.devices, aggregation)

    def close(self) -> None:
        """End the replicas; all processes call it. The program's objects stay usable.

        Raises:
            ConfigError: Replicas of different processes differ.
        """
        try:
            self.check_replicas()
        finally:
            self._copies.forget()
            self._replicas.close()

    def check_replicas(self) -> None:
        """Compare the processes' replicas now; all processes call it.

        Replicas of one process are always compared after each step.

        Raises:
            ConfigError: Replicas of different processes differ.

        Cost: a pass over the parameters, and an all-gather of 8 bytes for each tensor.
        """
        self._copies.compare_processes()

    def local_index(self, replica: ReplicaContext) -> int:
        """Return the number of a replica within this process."""
        return 0 if len(self.devices) == 1 else replica.replica_id_in_sync_group

    def copies_of(self, param: torch.Tensor) -> list[torch.Tensor]:
        """Return the copies of a parameter that the replicas of this process have.

        Raises:
            ConfigError: The parameter was made outside of the scope.
        """
        self._copies.prepare()
        name = self._copies.objects[0].names.get(id(param))
        if name is None:
            msg = (
                f"a parameter of shape {list(param.shape)} is in no module made in this "
                "strategy's scope: make its model there"
            )
            raise ConfigError(msg)
        return [dict(objects.named())[name] for objects in self._copies.objects]

    def _copy_of(self, thing: object) -> Any:
        """Return the copy of an object for this thread's replica; None to use the object."""
        replica = get_replica_context()
        if replica is None or replica.strategy is not self or not self._copies.objects:
            return None
        return self._copies.objects[self.local_index(replica)].copies.get(id(thing))

    def _average_gradients(
        self, objects: ReplicaObjects, index: int, group: Group, hooks: list[Any]
    ) -> None:
        """Average a replica's gradients from now on; add hooks to remove at the end to `hooks`."""
        for x in objects.tensors().values():
            group.broadcast(x.detach(), 0)
        named = objects.named()
        for optimizer in objects.optimizers:
            params = {id(p) for g in optimizer.param_groups for p in g["params"]}
            of_optimizer = [(name, p) for name, p in named if id(p) in params]
            hooks += self._average(objects, index, group, optimizer, of_optimizer)
            hooks.append(optimizer.register_step_pre_hook(partial(average_closure, group)))

    def _average(
        self, objects: ReplicaObjects, index: int, group: Group, optimizer: Any, named: list[Any]
    ) -> Sequence[Any]:
        """Average the gradients of an optimizer's parameters over replicas from now on."""
        del index
        cap_mb = self._bucket_cap_mb(sum(param.nbytes for _, param in named))
        sparse = objects.sparse()
        AveragingOptimizer(
            optimizer, named, process_group=group, bucket_cap_mb=cap_mb, sparse_parameters=sparse
        )
        return ()

    @contextmanager
    def _in_replica(self, index: int, group: Group, part: float, *, is_new: bool) -> Iterator[None]:
        """Run the block as one of the replicas of this process."""
        objects = self._copies.objects[index]

        def merge(call: Callable[..., Any], values: tuple[Any, ...], named: dict[str, Any]) -> Any:
            def once(passed: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
                by_name = {k: PerReplica([names[k] for _, names in passed]) for k in named}
                with entered(self):
                    return call(self, *merged([x for x, _ in passed]), **by_name)

            return of_replica(self._replicas.merge(index, (values, named), once), index)

        factor = part * group.size
        with ExitStack() as stack:
            stack.enter_context(entered(self, ReplicaContext(self, group, part, merge)))
            for _, param in objects.named() if factor != 1 else ():
                if param.requires_grad:  # the plain average is then weighted by samples
                    hook = param.register_hook(partial(torch.mul, factor))  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)
            if is_new:
                others = self._copies.objects[0].tensor_names()
                stack.enter_context(ParameterCheck(objects.tensor_names(), others, group.rank))
            yield

    def _check_optimizer(self, optimizer: Any, *_: Any) -> None:
        """Raise an error if a replica steps an optimizer that was made outside of the scope."""
        replica = get_replica_context()
        if replica is None or replica.strategy is not self:
            return
        optimizers = self._copies.objects[self.local_index(replica)].optimizers
        if not any(optimizer is made for made in optimizers):
            msg = (
                f"{type(optimizer).__name__} was not made in this strategy's scope, so its "
                "gradients are not averaged: make it inside of strategy.scope()"
            )
            raise ConfigError(msg)


def _number(value: Any) -> torch.Tensor:
    """Return a value of a replica as a tensor; integers as int64, so sums do not overflow."""
    x = torch.as_tensor(value).detach()
    return x if x.is_floating_point() or x.is_complex() else x.long()


def compute_average_loss(
    per_sample_loss: torch.Tensor, global_batch_size: int | None = None
) -> torch.Tensor:
    """Return the loss of one replica, scaled so that the average over replicas is the batch mean.

    Call it in a replica. The averaged gradients are then the gradients of the mean loss over the
    whole batch, also if replicas have different numbers of samples.

    Args:
        per_sample_loss: Loss of each sample of the replica.
        global_batch_size: Number of samples of all replicas; when None, the mean over this
            replica's samples is returned.
    """
    replica = get_replica_context()
    part = 1.0 if replica is None else replica.share
    if global_batch_size is None:
        return per_sample_loss.mean()
    return per_sample_loss.sum() / (global_batch_size * part)
