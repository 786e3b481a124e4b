"""Storage of a dense shard that consists of several parameters, which are stepped separately.

Problem: a parameter server stores many small parameters in one table. An optimizer does not change
a parameter without a gradient, nor its state and step count. A single vector that is stepped as a
whole cannot do so: weight decay and momentum would change parameters that no worker has used.

Idea: use one `DenseStorage` per parameter, from the first update with a missing gradient on. Until
then all parameters have the same step count, and a single storage is five times as fast. A push has
flags for the parameters with a gradient if some lack one; an update includes a parameter if any
push has a gradient for it.

    grad   |-- weight --|- bias -|-- head --|       has   1 0 1     the bias is not stepped

Exported state: elementwise values are vectors like the parameters; values of a whole parameter,
such as its step count, are in `param.*`, in the order of `sizes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from braid.ps.storage.checks import Expected, check_tensors
from braid.ps.storage.dense import DenseStorage, sum_of
from braid.ps.storage.resharding import PARAM
from braid.ps.storage.rules import Rule
from braid.ps.storage.steppers import MakeOptimizer
from braid.ps.storage.storage import State, Storage, Tensors

__all__ = ["ParameterStorage"]

COMMON = {"values", "updates", "lr"}
HAS_STATE = f"{PARAM}has_state"


class ParameterStorage(Storage):
    """A shard of a dense table of several parameters, stepped by an optimizer.

    A push is `(grad,)` or `(grad, has)`, a query is `()`, and a read returns `(values,)`.

    Args:
        values: First values of the shard; copied.
        rule: See `DenseStorage`.
        sizes: Number of elements of each parameter in the shard.
        table: Name of the table, for messages.

    Shape:
        values, grad: [n], n = sum of sizes. has: [number of sizes], uint8.

    Raises:
        ConfigError: See `DenseStorage`.
    """

    def __init__(
        self,
        values: torch.Tensor,
        rule: Rule | MakeOptimizer,
        sizes: Sequence[int],
        *,
        table: str,
    ) -> None:
        self.table = table
        self._rule = rule
        self._sizes = list(sizes) or [0]
        self._updates = 0
        self._lengths = [sum(self._sizes)]  # one part for all parameters, later one for each
        self._parts = self._made(values, self._lengths)
        self._whole: torch.Tensor | None = None

    def _made(self, values: torch.Tensor, lengths: list[int]) -> list[DenseStorage]:
        parts = torch.split(values, lengths)
        return [DenseStorage(part, self._rule, table=self.table) for part in parts]

    def check(self, push: Tensors) -> None:
        """Check the tensors of a push; see `Storage.check`."""
        dtype, length = self._parts[0].values.dtype, sum(self._sizes)
        expected = [
            Expected("grad", dtype, (length,)),
            Expected("has", torch.uint8, (len(self._sizes),)),
        ]
        advice = "Declare the same table on workers and servers"
        check_tensors(self.table, "a push", push, expected[: max(1, len(push))], advice)

    def check_query(self, query: Tensors) -> None:
        """Check the tensors of a query; see `Storage.check_query`."""
        self._parts[0].check_query(query)

    def merge(self, pushes: Sequence[Tensors], scale: float) -> Tensors:
        """Add pushes in the given order; combine their flags with a logical or."""
        total = sum_of([push[0] for push in pushes], scale)
        if any(len(push) == 1 for push in pushes):
            return (total,)
        has = torch.stack([push[1] for push in pushes]).amax(0)
        return (total,) if bool(has.all()) else (total, has)

    def apply(self, update: Tensors) -> None:
        """Step the parameters that have a gradient."""
        if len(update) > 1 and self._lengths != self._sizes:
            self._load(self.export(), self._sizes)
        grads = torch.split(update[0], self._lengths)
        has = update[1].tolist() if len(update) > 1 else [1] * len(grads)
        for part, grad, some in zip(self._parts, grads, has, strict=True):
            if some:
                part.apply((grad,))
        self._updates += 1
        self._whole = None

    def read(self, query: Tensors) -> Tensors:  # noqa: ARG002 - empty
        """Return a copy of the values; calls before the next `apply` return the same copy."""
        if self._whole is None:
            self._whole = torch.cat([part.values for part in self._parts])
        return (self._whole,)

    def export(self) -> State:
        """Return a copy of the whole state by name; see `Storage.export`."""
        exports = [part.export() for part in self._parts]
        state: State = {
            "values": torch.cat([export["values"] for export in exports]),
            "updates": torch.tensor(self._updates),
            "lr": exports[0]["lr"],
            "sizes": torch.tensor(self._lengths),
            HAS_STATE: torch.tensor([int(export.keys() > COMMON) for export in exports]),
        }
        examples = {name: value for export in exports for name, value in export.items()}
        for name, example in examples.items():
            if name in COMMON:
                continue
            if example.dim():
                state[name] = torch.cat(
                    [
                        export.get(name, example.new_zeros(size))
                        for export, size in zip(exports, self._lengths, strict=True)
                    ]
                )
            else:
                zero = torch.zeros_like(example)
                numbers = torch.stack([export.get(name, zero) for export in exports])
                state[f"{PARAM}{name}"] = numbers
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the whole state by a copy of `state`; see `Storage.load`."""
        dtype, length = self._parts[0].values.dtype, sum(self._sizes)
        expected = [Expected("values", dtype, (length,)), Expected("sizes", torch.int64, (None,))]
        tensors = [state[name] for name in ("values", "sizes") if name in state]
        advice = "Split a table's state with the table's number of shards"
        check_tensors(self.table, "the state", tensors, expected, advice)
        numbers = [value for name, value in state.items() if name.startswith(PARAM)]
        alike = all(bool((value == value[:1]).all()) for value in numbers)
        self._load(state, [length] if alike else self._sizes)

    def _load(self, state: Mapping[str, torch.Tensor], lengths: list[int]) -> None:
        """Replace the state, and divide the shard into parts of these lengths."""
        parts, sizes = self._made(state["values"], lengths), state["sizes"].tolist()
        ends = torch.tensor([*accumulate(sizes)])
        starts = [*accumulate(lengths, initial=0)]
        for part, (start, end) in zip(parts, pairwise(starts), strict=True):
            index = min(int(torch.searchsorted(ends, start, right=True)), len(sizes) - 1)
            part.load(_part_of(state, slice(start, end), index))
        self._parts, self._lengths, self._whole = parts, lengths, None
        self._updates = int(state["updates"])

    def statistics(self) -> dict[str, int]:
        """Return counts by name, such as `num_updates`; see `Storage.statistics`."""
        num_bytes = sum(part.values.nbytes for part in self._parts)
        return {"num_updates": self._updates, "num_bytes": num_bytes}

    @property
    def lr(self) -> float:
        """Learning rate; see `Storage.lr`."""
        return self._parts[0].lr

    def set_lr(self, lr: float) -> None:
        """Change the learning rate; see `Storage.set_lr`."""
        for part in self._parts:
            part.set_lr(lr)

    def check_lr(self, lr: float) -> None:
        """Check a learning rate; see `Storage.check_lr`."""
        self._parts[0].check_lr(lr)


def _part_of(state: Mapping[str, torch.Tensor], elements: slice, index: int) -> State:
    """Return the state of one parameter, in the form of `DenseStorage`.

    Args:
        state: State of the shard.
        elements: Elements of the parameter.
        index: Index of the parameter in the state's `sizes`.
    """
    has_state = bool(state[HAS_STATE][index])
    part: State = {}
    for name, value in state.items():
        if name in COMMON:
            part[name] = value[elements] if value.dim() else value
        elif has_state and name not in {"sizes", HAS_STATE}:
            whole = name.startswith(PARAM)
            part[name.removeprefix(PARAM)] = value[index] if whole else value[elements]
    return part
