"""`braid.ParameterServer`: a module with its parameters on servers.

    node = ps.join(braid.init())
    model = braid.ParameterServer(Net(), node, partial(torch.optim.AdamW, lr=1e-3))
    if not node.is_worker:
        node.serve()
    else:
        for inputs, labels in batches:
            criterion(model(inputs), labels).backward()   # pushes gradients as they become ready
            model.step()                                  # pulls

Parameters are divided into partitions of a few megabytes, in the order in which backward computes
their gradients. Each partition is a dense table. It is pushed when its last gradient is ready, and
pulled directly into the parameters' memory.

    backward   layer 3, layer 2, layer 1        push 3    push 2    push 1
    step                                                        pull 1, 2, 3: urgent first
    forward    layer 1 ...                      with `cross_barrier` as soon as layer 1 is there

Where the optimizer runs:
    servers    servers step; workers pull parameters
    workers    servers only sum gradients; workers pull sums, and each one steps, as in BytePS

Sources: M. Li et al., Parameter Server, OSDI 2014; Y. Jiang et al., BytePS, OSDI 2020; Y. Peng et
al., ByteScheduler, SOSP 2019 (partitions, priorities, crossing the barrier).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from braid.errors import ConfigError
from braid.parallel.gradients import FlatBuffer
from braid.parallel.gradients.incomplete import Use, note_incomplete
from braid.ps.consistency import BSP, Consistency
from braid.ps.dense import DenseTable
from braid.ps.node import Node
from braid.ps.storage import Rule
from braid.ps.storage.steppers import MakeOptimizer
from braid.runtime.message import NUM_PRIORITIES
from braid.runtime.torch_internals import version_of
from braid.types import first_few

__all__ = ["ParamGroup", "ParameterServer"]

PARTITION_BYTES = 4 << 20
SAMPLES = 16  # values of a parameter that are compared, to notice changes by a worker
OVERWRITTEN = (
    "{!r} has been changed on this worker since the last step, but servers have its value, and "
    "would overwrite it: load states before ParameterServer is made, and change values by the "
    "optimizer, or train with where='workers'"
)
ParamGroup: TypeAlias = "tuple[list[nn.Parameter], Rule | MakeOptimizer]"


class _ParamPartition:
    """Parameters that are stored in one table.

    Args:
        table: Flat table of the parameters.
        params: Parameters, in the order of the table.
        flat: Memory to receive values, or sums of gradients, into.
        optimizer: Optimizer of these parameters on the worker; None if servers step.
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
        self._at = _samples(params)
        self._arrived: torch.Tensor | None = None  # values at these positions
        self._pushed: list[tuple[torch.Tensor | None, int]] = []  # gradients with their versions

    def ready(self, param: nn.Parameter) -> None:
        """Record that a parameter's gradient is ready; push when the last one is."""
        if self.is_pushed:
            msg = (
                "backward ran twice before step(), while the gradients of the first are being "
                "pushed. Use `with model.accumulate():` around all backwards but the last"
            )
            raise ConfigError(msg)
        self._missing.discard(param)
        if not self._missing:
            self.push()

    def push(self) -> None:
        """Push all gradients (zeros for missing ones), with flags that mark the existing ones."""
        if self.is_pushed:
            return
        has = [param.grad is not None for param in self.params]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        parts = [grad.detach().reshape(-1).cpu() for grad in grads]
        if self.optimizer is None:
            self.table.push_async(torch.cat(parts), has=has, priority=self.priority)
        else:  # the sum of flags is the number of workers with a gradient of the parameter
            flags = torch.tensor(has, dtype=parts[0].dtype)
            self.table.push_async(torch.cat([*parts, flags]), priority=self.priority)
        self._pushed = [_state_of(param.grad) for param in self.params]
        self.is_pushed = True

    def check(self, names: Mapping[nn.Parameter, str]) -> None:
        """Raise if the program has changed parameters or pushed gradients since the last step.

        Raises:
            ConfigError: A parameter or gradient of this worker differs from that of the servers.
        """
        for param, view in zip(self.params, self._flat.views, strict=False):
            if self._arrived is not None and param.data_ptr() != view.data_ptr():
                raise ConfigError(OVERWRITTEN.format(names[param]))
        if self._arrived is not None:
            same = torch.eq(self._flat.tensor[self._at], self._arrived) | self._arrived.isnan()
            if not same.all():
                changed = int(self._at[same.logical_not()][0])
                ends = accumulate(param.numel() for param in self.params)
                place = next(place for place, end in enumerate(ends) if changed < end)
                raise ConfigError(OVERWRITTEN.format(names[self.params[place]]))
        for param, (grad, version) in zip(self.params, self._pushed, strict=False):
            if param.grad is not grad or _state_of(param.grad)[1] != version:
                msg = (
                    f"the gradient of {names[param]!r} has been changed after it had been pushed "
                    "during backward: run backward inside of `with model.accumulate():`, then "
                    "change it before model.step()"
                )
                raise ConfigError(msg)

    def pull(self) -> None:
        """Begin to receive the values of the next clock."""
        self._pull = self.table.pull_async(self._flat.tensor, priority=self.priority)
        self._missing = set(self.params)
        self.is_pushed = False
        self._arrived, self._pushed = None, []

    @torch.no_grad()
    def arrive(self) -> None:
        """Wait for the pull, then store its values in the parameters, or step with its sums."""
        if self._pull is None:
            return
        self.table.wait(self._pull)
        self._pull = None
        if self._is_first and self.optimizer is not None and self.table.clock:
            msg = (
                f"this worker would replace one that was lost at step {self.table.clock}, but "
                "where='workers' keeps parameters on workers only: use where='servers'"
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
        if self.optimizer is None and self.params[0].device.type == "cpu":
            self._arrived = self._flat.tensor[self._at]


class ParameterServer(nn.Module):
    """A module with its parameters on servers. All nodes construct it from the same module.

    Gradients are pushed during backward. To clip or inspect them, run backward inside of
    `accumulate()`: then `step` pushes them. Buffers, such as batch normalization statistics, are
    local to each worker. A parameter is not stepped if no worker has a gradient for it; if only
    some have one, the missing gradients count as zeros. If a worker does not call `step`, the
    other workers wait for it as far as the consistency requires.

    Args:
        module: The module. Workers begin with the servers' values of its parameters.
        node: This rank's node.
        optimizer: Rule, or function of parameters that returns an optimizer. On servers the
            optimizer must be elementwise. Or pairs of parameters and the optimizer for them.
        consistency: When pushes are applied, and pulls answered.
        where: Nodes on which the optimizer runs.
        partition_bytes: Largest size of a partition, unless a single parameter is larger.
        cross_barrier: Whether `step` returns immediately, and each layer of the next forward waits
            for its own parameters. If so, do not read parameters between `step` and forward.
        name: Prefix of the tables' names.

    Raises:
        ConfigError: No parameter requires a gradient, the optimizer cannot run on servers, or
            workers step with a staleness above 0. If workers step, also raised by the first
            forward of a worker that replaces a lost one.
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
                "with where='workers', workers step with a torch optimizer once per clock: pass a "
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
            msg = (
                f"{type(module).__name__} has no parameter that requires a gradient: leave it "
                "out of the parameter server"
            )
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
        if node.is_worker:
            note_incomplete(self, ParameterServer.parameters, _refusal)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module, once its parameters have arrived."""
        if not self._cross_barrier:
            self.wait()
        return self.module(*args, **kwargs)

    def step(self) -> None:
        """Push the remaining gradients, and pull the parameters of the next clock.

        Raises:
            CommError: A server refuses.
            PeerLostError: A server was lost with all copies of a shard.
            CommTimeout: Other workers did not push in time.
            ConfigError: Parameters or pushed gradients have been changed on this worker, or
                parameters unfrozen that have no place on servers.
        """
        self._check_changes()
        for partition in self._partitions:
            partition.push()
        for partition in reversed(self._partitions):  # the forward uses these first
            partition.pull()
        if not self._cross_barrier:
            self.wait()

    def _check_changes(self) -> None:
        names = {param: name for name, param in self.module.named_parameters()}
        for partition in self._partitions:
            partition.check(names)
        known = {param for partition in self._partitions for param in partition.params}
        new = [name for param, name in names.items() if param.requires_grad and param not in known]
        if new and self._partitions:
            msg = (
                f"{first_few(new)} have been unfrozen or added since ParameterServer was made, so "
                "servers do not train them: make it of a module in which they require a gradient"
            )
            raise ConfigError(msg)

    def wait(self) -> None:
        """Wait until all parameters have arrived."""
        for partition in reversed(self._partitions):
            partition.arrive()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients in backward without pushing them, inside of this context."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameters from this clock on; all workers call it.

        It replaces the rates of all parameter groups.
        """
        for partition in self._partitions:
            if partition.optimizer is None:
                partition.table.set_lr(lr)
            else:
                for group in partition.optimizer.param_groups:
                    group["lr"] = lr

    def set_consistency(self, consistency: Consistency) -> None:
        """Change the consistency from this clock on; all workers call it.

        Raises:
            ConfigError: Workers step, and the new staleness is above 0.
        """
        if not consistency.by_clock and any(part.optimizer for part in self._partitions):
            msg = (
                f"where='workers' needs staleness 0, got {consistency}: leave consistency out, or "
                "pass where='servers'"
            )
            raise ConfigError(msg)
        for partition in self._partitions:
            partition.table.set_consistency(consistency)

    @property
    def num_partitions(self) -> int:
        """Number of tables that the parameters are divided into."""
        return len(self._partitions)

    @property
    def has_pushed(self) -> bool:
        """Whether gradients of this clock have been pushed."""
        return any(partition.is_pushed for partition in self._partitions)

    def _add(
        self,
        table: DenseTable,
        params: Sequence[nn.Parameter],
        flat: FlatBuffer,
        make: object,
    ) -> None:
        """Add a partition on a worker: register its hooks, and begin to pull its values."""
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
            members = set(params)
            for layer in self.module.modules():
                if members & set(layer.parameters(recurse=False)):
                    layer.register_forward_pre_hook(lambda *_: partition.arrive())


def _refusal(model: ParameterServer, _: object, use: Use) -> str:
    """Return why a function of torch cannot be used on gradients that have been pushed."""
    if not model.has_pushed:
        return ""
    return (
        f"torch's {use} was called after gradients had been pushed during backward: run backward "
        "inside of `with model.accumulate():`, then call it before model.step()"
    )


def _evenly(numel: int) -> torch.Tensor:
    return torch.linspace(0, numel - 1, min(SAMPLES, numel), dtype=torch.float64).long()


def _samples(params: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return positions in a flat vector of parameters, up to `SAMPLES` in each of them."""
    starts = accumulate((param.numel() for param in params), initial=0)
    parts = [start + _evenly(param.numel()) for start, param in zip(starts, params, strict=False)]
    return torch.cat(parts)


def _state_of(grad: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """Return a gradient with the number of its changes."""
    return grad, 0 if grad is None else version_of(grad)


def _ready(
    server: weakref.ref[ParameterServer],
    partition: weakref.ref[_ParamPartition],
    param: nn.Parameter,
) -> None:
    """Record a gradient, unless the module is inside of `accumulate()`.

    References are weak: the garbage collector does not see that a parameter keeps its hooks alive.
    """
    net, ready_partition = server(), partition()
    if net is not None and ready_partition is not None and not net._accumulates:  # noqa: SLF001 - its hook
        ready_partition.ready(param)


def _groups(
    module: nn.Module, optimizer: Rule | MakeOptimizer | Sequence[ParamGroup]
) -> list[ParamGroup]:
    """Return the pairs of parameters and optimizer; check that each parameter has one optimizer."""
    if isinstance(optimizer, Rule) or callable(optimizer):
        return [(list(module.parameters()), optimizer)]
    groups = [(list(params), make) for params, make in optimizer]
    counts = Counter(param for params, _ in groups for param in params)
    wrong = [n for n, p in module.named_parameters() if p.requires_grad and counts[p] != 1]
    if wrong:
        msg = (
            "each parameter must be in one pair of parameters and optimizer: "
            f"{', '.join(wrong[:5])} are in none or in several: put each into exactly one pair"
        )
        raise ConfigError(msg)
    return groups


def _divided(
    module: nn.Module, groups: Sequence[ParamGroup], partition_bytes: int
) -> list[ParamGroup]:
    """Return the parameters of each partition, last layers first.

    All parameters of a partition have the same dtype, device and optimizer.
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
