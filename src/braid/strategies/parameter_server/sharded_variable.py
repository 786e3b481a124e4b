"""ShardedVariable: values on servers that programs read and change by rows, such as counters.

    seen = strategy.variable("seen", torch.zeros(1000))       in all processes, before training
    seen.scatter_add(ids, torch.ones(len(ids)))               servers change the rows
    seen.sparse_read(ids)                                     only the rows of ids travel

A change is an operation that servers carry out, in the order in which they come. In a closure it
carries the closure's number, so that it is carried out once. With an aggregation a change needs all
workers, and servers carry out the mean or the sum of theirs.

Source: TensorFlow 2.21, `ShardedVariable`, `AggregatingVariable` and `CachingVariable`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Literal

import torch

from braid.errors import ConfigError
from braid.ps import Consistency
from braid.ps.customer import Customer
from braid.ps.messages import Pull, Pulled, Specs
from braid.ps.storage import State, Storage, Tensors
from braid.ps.storage.checks import Expected, check_tensors
from braid.ps.storage.dense import sum_of
from braid.ps.table import Table, TableSpec
from braid.runtime.message import Delivery
from braid.runtime.tensor_buffers import as_buffers, checksum, from_buffers

__all__ = ["ShardedVariable", "VariableStorage", "variable_spec"]

Aggregation = Literal["none", "mean", "sum"]
Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

OPERATIONS: dict[str, Operation] = {
    "assign": lambda rows, values: values,  # noqa: ARG005
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": torch.maximum,
    "min": torch.minimum,
}
NAMES = list(OPERATIONS)
ADVICE = "Declare the same variables on workers and servers"


class VariableStorage(Storage):
    """Rows of a variable on one server.

    A push is `(operation, ids, values)`, or several of these in sequence. A query is `(ids,)`, or
    `()` for all rows; a read returns `(rows,)`.

    Args:
        values: First rows, of shape [rows, dim]; copied.
        aggregation: Whether pushes of one clock are combined into one.
        table: Name of the variable, for messages.
    """

    def __init__(self, values: torch.Tensor, aggregation: Aggregation, *, table: str) -> None:
        self.table = table
        self._values = values.detach().clone()
        self._aggregation = aggregation
        self._updates = 0

    def check(self, push: Tensors) -> None:
        """Check the tensors of a push; see `Storage.check`."""
        count = push[1].numel() if len(push) > 1 else 0
        expected = [
            Expected("operation", torch.int64, ()),
            Expected("ids", torch.int64, (count,)),
            Expected("values", self._values.dtype, (count, self._values.shape[1])),
        ]
        check_tensors(self.table, "a push", push, expected, ADVICE)
        if not 0 <= int(push[0]) < len(NAMES):
            msg = (
                f"variable {self.table!r} got the unknown operation {int(push[0])}: install the "
                "same version of braid on all nodes"
            )
            raise ConfigError(msg)
        if NAMES[int(push[0])] == "div" and not self._values.is_floating_point():
            msg = (
                f"scatter_div needs a floating-point variable, but {self.table!r} is "
                f"{self._values.dtype}: declare it with a floating-point dtype"
            )
            raise ConfigError(msg)
        self._check_rows(push[1])

    def check_query(self, query: Tensors) -> None:
        """Check the tensors of a query; see `Storage.check_query`."""
        if query:
            check_tensors(
                self.table, "a query", query, [Expected("ids", torch.int64, (None,))], ADVICE
            )
            self._check_rows(query[0])

    def merge(self, pushes: Sequence[Tensors], scale: float) -> Tensors:
        """Return all changes in the given order; with an aggregation, their sum as one change."""
        if self._aggregation == "none":
            return tuple(tensor for push in pushes for tensor in push)
        operation, ids, _ = pushes[0]
        if any(not operation.equal(o) or not ids.equal(i) for o, i, _ in pushes):
            msg = (
                f"workers change variable {self.table!r} in different ways in one step: with an "
                "aggregation, use the same operation and rows on all"
            )
            raise ConfigError(msg)
        return operation, ids, sum_of([values for *_, values in pushes], scale)

    @torch.no_grad()
    def apply(self, update: Tensors) -> None:
        """Carry out changes in order; a row that occurs twice in a change is changed twice."""
        values = self._values.clone()  # readers may hold the old ones
        for place in range(0, len(update), 3):
            operation, ids, operands = update[place : place + 3]
            change = OPERATIONS[NAMES[int(operation)]]
            if torch.unique(ids).numel() == ids.numel():
                values[ids] = change(values[ids], operands)
                continue
            for number, row in enumerate(ids.tolist()):
                values[row] = change(values[row], operands[number])
        self._values = values
        self._updates += 1

    def read(self, query: Tensors) -> Tensors:
        """Return the rows that `query` names; see `Storage.read`."""
        return (self._values[query[0]] if query else self._values,)

    def export(self) -> State:
        """Return a copy of the whole state by name; see `Storage.export`."""
        return {"values": self._values.flatten(), "updates": torch.tensor(self._updates)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the whole state by a copy of `state`; see `Storage.load`."""
        expected = Expected("values", self._values.dtype, (self._values.numel(),))
        check_tensors(self.table, "the state", [state["values"]], [expected], ADVICE)
        self._values = state["values"].view(self._values.shape).clone()
        self._updates = int(state["updates"])

    def statistics(self) -> dict[str, int]:
        """Return counts by name, such as `num_updates`; see `Storage.statistics`."""
        return {"num_updates": self._updates, "num_bytes": self._values.nbytes}

    def _check_rows(self, ids: torch.Tensor) -> None:
        wrong = ids[(ids < 0) | (ids >= len(self._values))]
        if len(wrong):
            msg = (
                f"variable {self.table!r} has no row {int(wrong[0])} in this shard: pass an id "
                "of an existing row"
            )
            raise ConfigError(msg)


class ShardedVariable(Table):
    """A variable on servers, as a worker sees it.

    Args:
        customer: Customer that sends this worker's requests; None on other nodes.
        spec: Spec of the variable's table.
        shape: Shape of the variable.
        dtype: Dtype of the variable.
    """

    def __init__(
        self, customer: Customer | None, spec: TableSpec, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        super().__init__(customer, spec)
        self.shape, self.dtype = shape, dtype
        self.is_combined = spec.consistency.by_clock  # over workers
        self._num_rows = shape[0] if shape else 1
        self._dim = math.prod(shape) // max(1, self._num_rows)
        rows = [length // max(1, self._dim) for length in spec.lengths]
        self._begins = torch.tensor([0, *accumulate(rows)])
        self._cached: torch.Tensor | None = None
        self._timestamps: list[int] = []  # of changes that have not been waited for

    def read(self) -> torch.Tensor:
        """Return the value. It is cached until this worker changes the variable or begins a step.

        Raises:
            PeerLostError: A server was lost with all copies of a shard.
        """
        if self._cached is None:
            self._cached = self._pulled(None).view(self.shape)
        return self._cached

    def sparse_read(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows `ids`; only these rows are sent.

        Shape:
            ids: [...], int64. Result: [..., *shape of a row].

        Raises:
            ConfigError: A row does not exist, or ids are not int64.
        """
        flat = self._checked(ids)
        return self._pulled(flat).view(*ids.shape, *self.shape[1:])

    def assign(self, value: torch.Tensor | float) -> None:
        """Replace the whole variable by `value`."""
        self._carry_out("assign", None, value)

    def assign_add(self, value: torch.Tensor | float) -> None:
        """Add `value` to the whole variable."""
        self._carry_out("add", None, value)

    def assign_sub(self, value: torch.Tensor | float) -> None:
        """Subtract `value` from the whole variable."""
        self._carry_out("sub", None, value)

    def scatter_update(self, ids: torch.Tensor, values: torch.Tensor | float) -> None:
        """Replace the rows `ids` by `values`; if an id repeats, its last row is used."""
        self._carry_out("assign", ids, values)

    def scatter_add(self, ids: torch.Tensor, values: torch.Tensor | float) -> None:
        """Add `values` to the rows `ids`."""
        self._carry_out("add", ids, values)

    def scatter_sub(self, ids: torch.Tensor, values: torch.Tensor | float) -> None:
        """Subtract `values` from the rows `ids`."""
        self._carry_out("sub", ids, values)

    def scatter_mul(self, ids: torch.Tensor, values: torch.Tensor | float) -> None:
        """Multiply the rows `ids` by `values`."""
        self._carry_out("mul", ids, values)

    def scatter_div(self, ids: torch.Tensor, values: torch.Tensor | float) -> None:
        """Divide the rows `ids` by `values`."""
        self._carry_out("div", ids, values)

    def scatter_max(self, ids: torch.Tensor, values: torch.Tensor | float) -> None:
        """Replace each element of the rows `ids` by the maximum of element and value."""
        self._carry_out("max", ids, values)

    def scatter_min(self, ids: torch.Tensor, values: torch.Tensor | float) -> None:
        """Replace each element of the rows `ids` by the minimum of element and value."""
        self._carry_out("min", ids, values)

    def begin_step(self) -> None:
        """Drop the cached value, so that the next `read` asks the servers again."""
        self._cached = None

    def wait_all(self) -> None:
        """Wait until the servers have accepted all changes of this worker."""
        for timestamp in self._timestamps:
            self.wait(timestamp)
        self._timestamps.clear()

    def _carry_out(self, name: str, ids: torch.Tensor | None, value: torch.Tensor | float) -> None:
        """Push a change of rows, of all when `ids` is None."""
        rows = torch.arange(self._num_rows) if ids is None else self._checked(ids)
        wanted = self.shape if ids is None else torch.Size([*ids.shape, *self.shape[1:]])
        values = torch.as_tensor(value).detach().cpu()
        is_whole = values.numel() == 1 and float(values) == round(float(values))
        if not torch.can_cast(values.dtype, self.dtype) and not is_whole:
            msg = (
                f"variable {self.name!r} is {self.dtype}, got values of {values.dtype}: convert "
                "them"
            )
            raise ConfigError(msg)
        if name == "div" and not self.dtype.is_floating_point:
            msg = (
                f"values of variable {self.name!r} ({self.dtype}) cannot be divided: use a "
                "floating-point dtype"
            )
            raise ConfigError(msg)
        values = values.to(self.dtype)
        try:
            values = values.expand(wanted).reshape(len(rows), self._dim)
        except RuntimeError:
            msg = (
                f"variable {self.name!r} needs values of shape {list(wanted)} here, got "
                f"{list(values.shape)}"
            )
            raise ConfigError(msg) from None
        operation = torch.tensor(NAMES.index(name))
        places, local = self._by_shard(rows)

        def build(parts: tuple[int, ...]) -> tuple[Specs, Sequence[memoryview]]:
            tensors = [
                tensor
                for part in parts
                for tensor in (operation, local[places[part]], values[places[part]].contiguous())
            ]
            specs, buffers = as_buffers(tensors)
            return [specs[k : k + 3] for k in range(0, len(specs), 3)], buffers

        self._timestamps.append(self._push(build, 0))
        self._cached = None

    def _pulled(self, ids: torch.Tensor | None) -> torch.Tensor:
        """Return rows, of shape [number, dim]."""
        count = self._num_rows if ids is None else len(ids)
        out = torch.empty(count, self._dim, dtype=self.dtype)
        places, local = self._by_shard(torch.arange(count) if ids is None else ids)
        asked = [part for part in range(self.num_shards) if len(places[part])]

        def build(parts: tuple[int, ...]) -> tuple[Pull, Sequence[memoryview]]:
            queries = [] if ids is None else [local[places[part]] for part in parts]
            specs, buffers = as_buffers(queries)
            nested: Specs = [[spec] for spec in specs] or [[] for _ in parts]
            return Pull(self.epoch, self.name, self.clock, parts, nested), buffers

        def on_answer(delivery: Delivery, parts: tuple[int, ...]) -> None:
            message = delivery.message
            assert isinstance(message, Pulled), "a pull is answered with values"
            flat = [spec for specs in message.specs for spec in specs]
            rows = from_buffers(flat, delivery.buffers)
            for part, values in zip(message.parts, rows, strict=True):
                if part in parts:
                    out[places[part]] = values

        self.wait(self._request(build, on_answer, parts=asked))
        return out

    def _by_shard(self, rows: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the places of each shard's rows, and each row's number in its shard."""
        shards = torch.searchsorted(self._begins, rows, right=True) - 1
        places = [(shards == part).nonzero().flatten() for part in range(self.num_shards)]
        return places, rows - self._begins[shards.clamp(max=self.num_shards - 1)]

    def _checked(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.dtype != torch.int64:
            msg = f"variable {self.name!r} needs int64 ids, got {ids.dtype}: use ids.long()"
            raise ConfigError(msg)
        flat = ids.detach().cpu().reshape(-1)
        wrong = flat[(flat < 0) | (flat >= self._num_rows)]
        if len(wrong):
            msg = (
                f"variable {self.name!r} has {self._num_rows} rows, so the id {int(wrong[0])} "
                f"does not exist: pass ids from 0 to {self._num_rows - 1}"
            )
            raise ConfigError(msg)
        return flat


def variable_spec(
    name: str,
    initial: torch.Tensor,
    rows: Sequence[int],
    aggregation: Aggregation,
    *,
    place: int,
    has_first: bool,
) -> TableSpec:
    """Return the spec of a variable, with a checksum of its first value if `has_first`.

    Args:
        name: Name of the variable.
        initial: First value.
        rows: Number of rows of each shard.
        aggregation: Whether a change is the mean or the sum of all workers' changes.
        place: Server of the first shard.
        has_first: Whether this node has the first value, as servers do.

    Raises:
        ConfigError: The aggregation is unknown.
    """
    if aggregation not in {"none", "mean", "sum"}:
        msg = f"aggregation must be none, mean or sum, got {aggregation!r}"
        raise ConfigError(msg)
    if aggregation == "mean" and not initial.is_floating_point():
        msg = (
            f"variable {name!r} of {initial.dtype} has no mean: use a floating-point dtype, or "
            "aggregation 'sum'"
        )
        raise ConfigError(msg)
    dim = initial.numel() // max(1, sum(rows))
    flat = initial.detach().cpu().reshape(sum(rows), dim).contiguous()
    begins = [0, *accumulate(rows)]
    combined = Consistency(aggregate="sum" if aggregation == "sum" else "mean")

    def make(shard: int) -> Storage:
        part = flat[begins[shard] : begins[shard + 1]]
        return VariableStorage(part, aggregation, table=name)

    return TableSpec(
        name=name,
        num_shards=len(rows),
        consistency=Consistency(staleness=math.inf) if aggregation == "none" else combined,
        make_storage=make,
        form=f"variable {initial.dtype}{list(initial.shape)} {[*rows]}, {aggregation}",
        first=checksum(flat) if has_first else 0,
        lengths=tuple(count * dim for count in rows),
        place=place,
    )
