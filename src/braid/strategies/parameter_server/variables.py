"""Variables on servers: the parameters of modules that were made in a scope.

    parameter of the model      shards                 servers, in turn
    encoder.weight [13, 4]      3 3 3 2 2 rows         0 1 0 1 0
    encoder.bias [4]            4                      1
    head.weight [2, 4]          2 rows                 0

    table of an optimizer       server 0: encoder.weight 0-2, 6-8, 11-12, head.weight
                                server 1: encoder.weight 3-5, 9-10, encoder.bias

The parameters of one optimizer are one table, in the order of servers: so a pull or a push is one
message to each server, however many variables there are. `pull` copies values into the parameters;
a step of the worker's optimizer pushes gradients, and servers step.

Source: TensorFlow 2.21, `ParameterServerStrategyV2` (variables round-robin, sharded variables).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import nn

from braid.errors import ConfigError
from braid.ps import Consistency, Node
from braid.ps.dense import MAX_SHARDS
from braid.ps.protocol.shard_state import TaskKey
from braid.ps.storage import State
from braid.ps.table import Table
from braid.strategies.parameter_server.partitioners import Partitioner, rows_of_shards
from braid.strategies.parameter_server.rows import EmbeddingRows
from braid.strategies.parameter_server.sharded_variable import ShardedVariable
from braid.strategies.parameter_server.variable_table import VariablePiece, VariableTable

__all__ = ["ServerVariables"]


_Pushed: TypeAlias = "VariableTable | EmbeddingRows"


class ServerVariables:
    """Parameters and floating-point buffers of modules, on servers. The same on all nodes.

    Buffers, and parameters without an optimizer, are pulled only once, so that all workers begin
    with the same values.

    Args:
        node: Node of this process.
        modules: The modules; sparse embeddings among them keep their rows on servers.
        optimizers: Optimizers of the parameters; the step of each pushes gradients from now on.
        consistency: When pushes are applied, and pulls answered.
        partitioner: Returns the number of shards of a parameter; one shard when None.
        restore: Snapshot to begin with, or a directory of snapshots.
        sharded: Variables that the program changes itself.

    Raises:
        CheckpointError: The snapshot lacks a variable.
        ConfigError: An optimizer cannot run on servers, or the partitioner's result is invalid.
    """

    def __init__(
        self,
        node: Node,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        consistency: Consistency,
        *,
        partitioner: Partitioner | None,
        restore: Path | None,
        sharded: Sequence[ShardedVariable] = (),
    ) -> None:
        self._sharded = sharded
        self._restore = restore
        self._node = node
        self._consistency = consistency
        self._partitioner = partitioner
        self._next = 0  # server of the next shard, counted without end
        self.num_steps = 0  # of this process
        self._pushes: list[tuple[Table, int]] = []  # not waited for yet
        self._has_constants = False
        self.is_fresh = False
        params, buffers = _named(modules)
        names = {id(param): name for name, param in params.items()}
        by_rows = _sparse_embeddings(modules)
        self._trained: dict[torch.optim.Optimizer, list[VariableTable]] = {}
        self._rows: dict[torch.optim.Optimizer, list[EmbeddingRows]] = {}
        for number, optimizer in enumerate(optimizers):
            self._trained[optimizer], self._rows[optimizer] = [], []
            for place, group in enumerate(optimizer.param_groups):
                twice = [p for p in group["params"] if id(p) not in names]
                if twice:
                    msg = (
                        f"a parameter of shape {list(twice[0].shape)} is in two optimizers or "
                        "parameter groups, but servers update each parameter once: leave one out"
                    )
                    raise ConfigError(msg)
                named = {names.pop(id(param)): param for param in group["params"]}
                dense = {name: p for name, p in named.items() if id(p) not in by_rows}
                make, prefix = _factory(optimizer, group), f"optimizer{number}.{place}"
                self._trained[optimizer] += self._tables(prefix, dense, make, group)
                self._rows[optimizer] += [
                    EmbeddingRows(
                        node,
                        name,
                        by_rows[id(param)],
                        optimizer,
                        group,
                        consistency=consistency,
                        restore=restore,
                    )
                    for name, param in named.items()
                    if id(param) in by_rows
                ]
            if _has_stepped(optimizer):
                msg = (
                    f"{type(optimizer).__name__} already has a state, which servers would not "
                    "get: pass Options(restore=...) to restore variables with their states"
                )
                raise ConfigError(msg)
            _replace_step(optimizer, self._step)
            optimizer.register_load_state_dict_pre_hook(_refuse_to_load)
        for module in modules:
            module.register_load_state_dict_pre_hook(_refuse_to_load)  # type: ignore[no-untyped-call]
        rest: dict[str, torch.Tensor] = {name: params[name] for name in names.values()}
        rest |= {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self._constants = self._tables("constants", rest, None, None)

    def pull(self) -> None:
        """Copy the values of servers into the parameters; see `DenseTable.pull`.

        A worker that was too late for a quorum of workers continues at the current clock.

        Cost: one message to each server and optimizer, and the bytes of all parameters.
        """
        self._node.postoffice.ensure_joined()
        self.wait()
        if self._consistency.quorum is not None or not self._has_constants:
            self.resume()
        wanted = self._all() if not self._has_constants else self._all_trained()
        timestamps = [table.pull() for table in wanted]
        for table, timestamp in zip(wanted, timestamps, strict=True):
            table.arrive(timestamp)
        for variable in self._sharded:
            variable.begin_step()
        self._has_constants = self.is_fresh = True

    def wait(self) -> None:
        """Wait until the servers have accepted all pushes of this worker."""
        for table, timestamp in self._pushes:
            table.wait(timestamp)
        self._pushes.clear()
        for variable in self._sharded:
            variable.wait_all()

    def pull_all(self) -> None:
        """Pull like `pull`, and also pull all rows of sparse embeddings."""
        self.pull()
        for rows in self._all_rows():
            rows.pull_all()

    def values(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of this process by name, without a pull."""
        params = {name: param for group in self._all() for name, param in group.params.items()}
        params |= {rows.name: rows.param for rows in self._all_rows()}
        return {name: param.detach() for name, param in params.items()}

    @torch.no_grad()
    def set_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy values into the parameters and buffers of this process."""
        for name, param in self.values().items():
            param.copy_(values[name])

    def export(self) -> dict[str, State]:
        """Return values and optimizer state of each variable, by name.

        Raises:
            ConfigError: Pushes are in flight, so that shards are at different steps.
        """
        states = {name: state for group in self._all() for name, state in group.export().items()}
        states |= {rows.name: rows.table.export() for rows in self._all_rows()}
        return states | {variable.name: variable.export() for variable in self._sharded}

    def model_tensors(self, states: Mapping[str, State]) -> dict[str, torch.Tensor]:
        """Return the values of exported variables by a model's parameter names in a checkpoint."""
        shapes = {name: values.shape for name, values in self.values().items()}
        rows = {emb.name: emb for emb in self._all_rows()}
        return {
            f"model/{name}": rows[name].whole(one)
            if name in rows
            else one["values"].view(shapes[name])
            for name, one in states.items()
            if name in shapes
        }

    def servers_of(self, name: str) -> list[int]:
        """Return the numbers of the servers on which a variable's shards were first placed."""
        count, shards = self._node.num_servers, list[tuple[int, int]]()
        for group in self._all():
            ends = [*accumulate(group.table.lengths)]
            at = 0
            for piece in group.pieces:
                at += piece.end - piece.begin
                shard = next(n for n, end in enumerate(ends) if at <= end)
                if piece.name == name:
                    shards.append((piece.begin, shard % count))
        return [server for _, server in sorted(shards)]

    def resume(self) -> int:
        """Continue at the clocks of this worker's earlier process; return its number of steps."""
        self._node.postoffice.ensure_joined()
        for table in self._tables_with_clocks():
            table.clock = table.fetch_clock()
        return min((group.table.clock for group in self._all_pushed()), default=0)

    def oldest_task(self) -> int:
        """Return the number of the oldest task that servers do not know to be finished."""
        tables = [*(group.table for group in self._all_pushed()), *self._sharded]
        return max((table.fetch_oldest_task() for table in tables), default=0)

    @contextmanager
    def task(self, key: TaskKey) -> Iterator[None]:
        """Add the key of a task to all pushes in the block; at its end, wait for the servers."""
        tables = [*(group.table for group in self._all_pushed()), *self._sharded]
        for table in tables:
            table.task = key
        try:
            yield
            self.wait()
        finally:
            for table in tables:
                table.task = None

    def _all_trained(self) -> list[VariableTable]:
        return [table for tables in self._trained.values() for table in tables]

    def _all_pushed(self) -> list[_Pushed]:
        return [*self._all_trained(), *self._all_rows()]

    def _all_rows(self) -> list[EmbeddingRows]:
        return [emb for tables in self._rows.values() for emb in tables]

    def _tables_with_clocks(self) -> list[Table]:
        tables: list[Table] = [group.table for group in self._all()]
        return [*tables, *(group.table for group in self._all_rows()), *self._sharded]

    def _all(self) -> list[VariableTable]:
        return [*self._all_trained(), *self._constants]

    def _tables(
        self,
        name: str,
        params: Mapping[str, torch.Tensor],
        make: Callable[..., torch.optim.Optimizer] | None,
        group: Mapping[str, Any] | None,
    ) -> list[VariableTable]:
        """Return a table of parameters for each of their dtypes."""
        count = self._node.num_servers
        by_dtype: dict[torch.dtype, list[list[VariablePiece]]] = {}
        for param_name, param in params.items():
            on_servers = by_dtype.setdefault(param.dtype, [[] for _ in range(count)])
            rows = rows_of_shards(self._partitioner, param.shape, param.dtype, MAX_SHARDS)
            row, begin = param.numel() // max(1, sum(rows)), 0
            for num_rows in rows:
                end = begin + num_rows * row
                on_servers[self._next % count].append(VariablePiece(param_name, param, begin, end))
                self._next, begin = self._next + 1, end
        return [
            VariableTable(
                self._node,
                f"{name}.{str(dtype).removeprefix('torch.')}",
                on_servers,
                make,
                group,
                consistency=self._consistency,
                restore=self._restore,
            )
            for dtype, on_servers in by_dtype.items()
        ]

    def _step(self, optimizer: torch.optim.Optimizer, closure: object = None) -> None:
        """Push the gradients of an optimizer's parameters, and pull the parameters."""
        if closure is not None:
            msg = (
                f"{type(optimizer).__name__}.step(closure) is not supported, as servers cannot "
                "compute the loss: call backward(), then step() without arguments"
            )
            raise ConfigError(msg)
        if not self._has_constants:
            msg = (
                f"{type(optimizer).__name__}.step() was called outside of strategy.run: call it "
                "in a function passed to strategy.run"
            )
            raise ConfigError(msg)
        dense, rows = self._trained[optimizer], self._rows[optimizer]
        known = sum(len(group.params) for group in dense) + len(rows)
        if known != sum(len(group["params"]) for group in optimizer.param_groups):
            msg = (
                f"{type(optimizer).__name__} got new parameters after the first step, which "
                "servers do not have: add parameter groups before the first step"
            )
            raise ConfigError(msg)
        pushed: list[_Pushed] = [*dense, *rows]
        self._pushes += [(group.table, group.push()) for group in pushed]
        self.num_steps += 1
        if self._consistency.quorum is None:
            timestamps = [group.pull() for group in dense]
            for group, timestamp in zip(dense, timestamps, strict=True):
                group.arrive(timestamp)
        else:
            self.pull()  # at the current clock, of all optimizers


def _factory(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
) -> Callable[..., torch.optim.Optimizer]:
    """Return a function of parameters that makes an optimizer with a group's options."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    options = {name: value for name, value in group.items() if name in accepted}
    options.pop("params", None)
    return partial(kind, **options)


def _sparse_embeddings(modules: Sequence[nn.Module]) -> dict[int, list[nn.Embedding]]:
    """Return the sparse embeddings that use each weight.

    Raises:
        ConfigError: An embedding changes its weight in forward.
    """
    by_weight: dict[int, list[nn.Embedding]] = {}
    for part in (part for module in modules for part in module.modules()):
        if not isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if part.max_norm is not None:
            msg = (
                f"an embedding of {part.num_embeddings} rows has max_norm={part.max_norm}, which "
                "would change only the worker's copy of the weight, not the servers': leave "
                "max_norm out"
            )
            raise ConfigError(msg)
        if isinstance(part, nn.Embedding) and part.sparse:
            by_weight.setdefault(id(part.weight), []).append(part)
    return by_weight


def _replace_step(
    optimizer: torch.optim.Optimizer, step: Callable[[torch.optim.Optimizer, object], None]
) -> None:
    """Give an optimizer another step, around which torch runs its hooks as before."""

    def stepped(optimizer: torch.optim.Optimizer, closure: object = None) -> None:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - for schedulers
        step(optimizer, closure)

    hooked: Any = torch.optim.Optimizer.profile_hook_step(stepped)
    hooked._wrapped_by_lr_sched = True  # noqa: SLF001 - schedulers need not wrap it
    vars(optimizer)["step"] = MethodType(hooked, optimizer)


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has taken a step; some create states in the constructor."""
    return any(
        "step" not in state or float(state["step"]) > 0
        for state in optimizer.state.values()
        if state
    )


def _refuse_to_load(*_: object) -> None:
    msg = (
        "load_state_dict() after the first step changes only this process, not the variables on "
        "servers: load before the first step in all processes, or use Options(restore=...)"
    )
    raise ConfigError(msg)


def _named(
    modules: Sequence[nn.Module],
) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Return parameters and buffers of modules by name; of several modules, by number and name."""
    prefixes = ["" if len(modules) == 1 else f"{i}." for i in range(len(modules))]
    pairs = list(zip(prefixes, modules, strict=True))
    params = {prefix + n: p for prefix, module in pairs for n, p in module.named_parameters()}
    buffers = {prefix + n: b for prefix, module in pairs for n, b in module.named_buffers()}
    return params, buffers
