"""`braid.ParameterServer`: a module whose parameters lie on servers.

    node = ps.join(braid.init())
    model = braid.ParameterServer(Net(), node, partial(torch.optim.AdamW, lr=1e-3))
    if not node.is_worker:
        node.serve()
    else:
        for inputs, labels in batches:
            criterion(model(inputs), labels).backward()   # pushes gradients as they become ready
            model.step()                                  # pulls

Parameters are divided into partitions of a few megabytes, in the order in which a backward makes
their gradients. Each partition is a dense table. It is pushed when its last gradient is there, and
pulled into the parameters' own memory.

    backward   layer 3, layer 2, layer 1        push 3    push 2    push 1
    step                                                        pull 1, 2, 3: urgent first
    forward    layer 1 ...                      with `cross_barrier` as soon as layer 1 is there

Where the optimizer runs:
    servers    they step; workers pull parameters
    workers    servers only sum; workers pull sums, and each steps by itself, as in BytePS

Sources: M. Li et al., Parameter Server, OSDI 2014; Y. Jiang et al., BytePS, OSDI 2020; Y. Peng et
al., ByteScheduler, SOSP 2019 (partitions, priorities, crossing the barrier).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from braid.errors import ConfigError
from braid.parallel.gradients import FlatBuffer
from braid.ps.consistency import BSP, Consistency
from braid.ps.dense import DenseTable
from braid.ps.node import Node
from braid.ps.storage import Rule
from braid.ps.storage.steppers import MakeOptimizer
from braid.runtime.message import NUM_PRIORITIES

__all__ = ["ParamGroup", "ParameterServer"]

PARTITION_BYTES = 4 << 20
ParamGroup: TypeAlias = "tuple[list[nn.Parameter], Rule | MakeOptimizer]"


class _ParamPartition:
    """Some parameters, which lie in one table.

    Args:
        table: The table, flat.
        params: Parameters, in the order of the table.
        flat: Memory that values, or sums, are received into.
        optimizer: Optimizer of these parameters on the worker; None where servers step.
        priority: Urgency of pulls.
    """

    def __init__(
        self,
        table: DenseTable,
        params: Sequence[nn.Parameter],
        flat: FlatBuffer,
        optimizer: Optimizer | None,
        priority: int,
    ) -> None:
        self.table = table
        self.params = params
        self.optimizer = optimizer
        self.priority = priority
        self.is_pushed = False
        self._flat = flat
        self._missing = set(params)
        self._pull: int | None = None
        self._is_first = True

    def ready(self, param: nn.Parameter) -> None:
        """Record that a gradient is there; push with the last one."""
        if self.is_pushed:
            msg = (
                "a second backward before step(): gradients of the first are on their way. Say "
                "`with model.accumulate():` around all backwards but the last"
            )
            raise ConfigError(msg)
        self._missing.discard(param)
        if not self._missing:
            self.push()

    def push(self) -> None:
        """Push all gradients, and which parameters have one; the others have zeros."""
        if self.is_pushed:
            return
        has = [param.grad is not None for param in self.params]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        parts = [grad.detach().reshape(-1).cpu() for grad in grads]
        if self.optimizer is None:
            self.table.push_async(torch.cat(parts), has=has, priority=self.priority)
        else:  # sums of flags say on how many workers a parameter has one
            flags = torch.tensor(has, dtype=parts[0].dtype)
            self.table.push_async(torch.cat([*parts, flags]), priority=self.priority)
        self.is_pushed = True

    def pull(self) -> None:
        """Begin to receive the values of the next clock."""
        self._pull = self.table.pull_async(self._flat.tensor, priority=self.priority)
        self._missing = set(self.params)
        self.is_pushed = False

    @torch.no_grad()
    def arrive(self) -> None:
        """Wait for what is pulled, and let the parameters have it."""
        if self._pull is None:
            return
        self.table.wait(self._pull)
        self._pull = None
        if self._is_first and self.optimizer is not None and self.table.clock:
            msg = (
                f"this worker begins at step {self.table.clock}, but where='workers' keeps "
                "parameters and optimizer states on workers only: with where='servers' a worker "
                "can replace a lost one"
            )
            raise ConfigError(msg)
        if self.optimizer is None or self._is_first:
            for param, view in zip(self.params, self._flat.views, strict=False):
                if param.data_ptr() != view.data_ptr():
                    param.copy_(view)
        else:
            *views, counts = self._flat.views
            for param, view, count in zip(self.params, views, counts.tolist(), strict=True):
                param.grad = view.to(param.device) if count else None
            self.optimizer.step()
        self._is_first = False
        for param in self.params:
            param.grad = None


class ParameterServer(nn.Module):
    """A module whose parameters lie on servers. All nodes make it of the same module.

    Gradients leave in backward: to clip them, or to look at them, run it inside of `accumulate()`,
    as `step` then pushes. Buffers, such as the statistics of batch normalization, stay each
    worker's own. A parameter that no worker has a gradient of is not stepped, as in one process;
    where some have one, the others count as zeros. A worker that does not call `step` keeps others
    waiting, as the consistency says.

    Args:
        module: The module. Workers begin with the servers' values of its parameters.
        node: This rank's node.
        optimizer: Rule, or function of parameters that returns an optimizer. On servers it must
            change each element by itself. Or pairs of parameters and the optimizer for them.
        consistency: When pushes are applied, and pulls answered.
        where: Nodes on which the optimizer runs.
        partition_bytes: Size from which on parameters begin another partition.
        cross_barrier: Whether `step` returns at once, and each layer of the next forward waits for
            its own parameters. Parameters must then not be read between `step` and forward.
        name: Prefix of the tables' names.

    Raises:
        ConfigError: No parameter requires a gradient, the optimizer cannot run on servers, or a
            consistency other than BSP is asked for where workers step. Raised by the first forward
            of a worker that replaces a lost one where workers step.
    """

    def __init__(
        self,
        module: nn.Module,
        node: Node,
        optimizer: Rule | MakeOptimizer | Sequence[ParamGroup],
        consistency: Consistency = BSP,
        *,
        where: Literal["servers", "workers"] = "servers",
        partition_bytes: int = PARTITION_BYTES,
        cross_barrier: bool = False,
        name: str = "model",
    ) -> None:
        super().__init__()
        if where not in {"servers", "workers"}:
            msg = f"where must be servers or workers, got {where!r}"
            raise ConfigError(msg)
        groups = _groups(module, optimizer)
        makes = [make for _, make in groups]
        has_rule = any(isinstance(make, Rule) for make in makes)
        if where == "workers" and (has_rule or not consistency.by_clock):
            msg = (
                "workers step with an optimizer of torch, after each clock of all of them: pass a "
                f"function of parameters and a consistency of staleness 0, got {makes} and "
                f"{consistency}"
            )
            raise ConfigError(msg)
        self.module = module
        self._node = node
        self._cross_barrier = cross_barrier
        self._accumulates = False
        self._partitions: list[_ParamPartition] = []
        partitions = _divided(module, groups, partition_bytes)
        if not partitions:
            msg = f"{type(module).__name__} has no parameter that requires a gradient"
            raise ConfigError(msg)
        for number, (params, make) in enumerate(partitions):
            on_workers = where == "workers"
            counts = [torch.Size([len(params)])] if on_workers else []
            flat = FlatBuffer([*(p.shape for p in params), *counts], params[0].dtype, _on_cpu)
            flat.tensor.zero_()
            with torch.no_grad():
                for param, view in zip(params, flat.views, strict=False):
                    view.copy_(param)
            table = node.dense(
                f"{name}.{number}",
                flat.tensor,
                None if on_workers else make,
                consistency,
                sizes=() if on_workers else [p.numel() for p in params],
            )
            if node.is_worker:
                self._add(table, params, flat, make if on_workers else None)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module, once its parameters have arrived."""
        if not self._cross_barrier:
            self.wait()
        return self.module(*args, **kwargs)

    def step(self) -> None:
        """Push what is not pushed, and pull the parameters of the next clock.

        Raises:
            CommError: A server refuses.
            PeerLostError: A server was lost with all copies of a shard.
            CommTimeout: Other workers did not push.
        """
        for partition in self._partitions:
            partition.push()
        for partition in reversed(self._partitions):  # those that the forward uses first
            partition.pull()
        if not self._cross_barrier:
            self.wait()

    def wait(self) -> None:
        """Wait until all parameters have arrived."""
        for partition in reversed(self._partitions):
            partition.arrive()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let backwards add to gradients without pushing them."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def set_lr(self, lr: float) -> None:
        """Step with another learning rate from this clock on; all workers call it.

        The rate is all parameters' one, whatever groups an optimizer on workers has.
        """
        for partition in self._partitions:
            if partition.optimizer is None:
                partition.table.set_lr(lr)
            else:
                for group in partition.optimizer.param_groups:
                    group["lr"] = lr

    def set_consistency(self, consistency: Consistency) -> None:
        """Let another consistency hold from this clock on; all workers call it.

        Raises:
            ConfigError: Workers step, and it is none of staleness 0.
        """
        if not consistency.by_clock and any(each.optimizer for each in self._partitions):
            msg = f"workers step after each clock of all: staleness must be 0, got {consistency}"
            raise ConfigError(msg)
        for partition in self._partitions:
            partition.table.set_consistency(consistency)

    @property
    def num_partitions(self) -> int:
        """Number of tables."""
        return len(self._partitions)

    def _add(
        self,
        table: DenseTable,
        params: Sequence[nn.Parameter],
        flat: FlatBuffer,
        make: object,
    ) -> None:
        """Take in a partition on a worker."""
        optimizer = make(list(params)) if callable(make) else None
        priority = min(len(self._partitions), NUM_PRIORITIES - 1)
        partition = _ParamPartition(table, params, flat, optimizer, priority)
        if optimizer is None and params[0].device.type == "cpu":
            for param, view in zip(params, flat.views, strict=True):
                param.data = view
        for param in params:
            param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(_ready, weakref.ref(self), weakref.ref(partition))
            )
        partition.pull()
        self._partitions.append(partition)
        if self._cross_barrier:
            own = set(params)
            for layer in self.module.modules():
                if own & set(layer.parameters(recurse=False)):
                    layer.register_forward_pre_hook(lambda *_: partition.arrive())


def _ready(
    server: weakref.ref[ParameterServer],
    partition: weakref.ref[_ParamPartition],
    param: nn.Parameter,
) -> None:
    """Record a gradient, unless it accumulates.

    References are weak: the garbage collector does not see that a parameter keeps its hooks alive.
    """
    net, own = server(), partition()
    if net is not None and own is not None and not net._accumulates:  # noqa: SLF001 - its hook
        own.ready(param)


def _groups(
    module: nn.Module, optimizer: Rule | MakeOptimizer | Sequence[ParamGroup]
) -> list[ParamGroup]:
    """Return pairs of parameters and their optimizer, which name each parameter once."""
    if isinstance(optimizer, Rule) or callable(optimizer):
        return [(list(module.parameters()), optimizer)]
    groups = [(list(params), make) for params, make in optimizer]
    counts = Counter(param for params, _ in groups for param in params)
    wrong = [n for n, p in module.named_parameters() if p.requires_grad and counts[p] != 1]
    if wrong:
        msg = (
            f"each parameter needs one optimizer; {', '.join(wrong[:5])} are in no pair, or in "
            "several"
        )
        raise ConfigError(msg)
    return groups


def _divided(
    module: nn.Module, groups: Sequence[ParamGroup], partition_bytes: int
) -> list[ParamGroup]:
    """Return the parameters of each partition, last layers first.

    Those of a partition have one dtype, device and optimizer.
    """
    number = {param: k for k, (params, _) in enumerate(groups) for param in params}
    open_ones: dict[object, list[nn.Parameter]] = {}
    partitions: list[ParamGroup] = []
    for param in reversed([p for p in module.parameters() if p.requires_grad]):
        kind = number[param], param.dtype, param.device
        params = open_ones.get(kind)
        if params is None or sum(p.nbytes for p in params) + param.nbytes > partition_bytes:
            params = open_ones[kind] = []
            partitions.append((params, groups[number[param]][1]))
        params.append(param)
    return partitions


def _on_cpu(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)
