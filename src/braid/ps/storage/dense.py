"""Storage of dense shards: a flat vector that is stepped, or replaced by a sum.

Problem: each pull needs values that do not change while they are sent. A copy for each pull costs
the same memory traffic as sending, w times per clock with w workers.

Idea: copy on write. A read returns the live vector without a copy; the next step first copies the
vector if it was read since the last step. So there is one copy for all readers between two steps,
and the old memory is freed with its last reader.

    apply   read  read  read   apply             apply
      │       └─────┴─────┴──── copy, step         └ step in place: not read since

Sources: M. Li et al., OSDI 2014; Y. Jiang et al., BytePS, OSDI 2020 (servers that only sum).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch

from braid.comm.tensors.reduction import combine
from braid.errors import ConfigError
from braid.ps.storage.checks import Expected, check_floating, check_tensors, described
from braid.ps.storage.rules import Rule
from braid.ps.storage.steppers import ADVICE, MakeOptimizer, stepper_of
from braid.ps.storage.storage import State, Storage, Tensors

__all__ = ["DenseStorage", "SumStorage", "sum_of"]


def sum_of(grads: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
    """Add gradients in the given order, and scale the sum once, in the first gradient's memory.

    16-bit gradients are summed in float32 and rounded once, as in collectives of a group.
    """
    total = grads[0].detach().contiguous()
    parts = [total, *map(torch.Tensor.detach, grads[1:])]
    combine(parts, total, "sum", None if scale == 1.0 else scale)
    return total


class _Vector(Storage):
    """Storage of a flat vector; pushes and reads have its shape."""

    def __init__(self, values: torch.Tensor, table: str) -> None:
        check_floating(table, values.dtype)
        if values.dim() != 1:
            msg = (
                f"table {table!r}: a dense shard is a vector, got values of shape "
                f"{list(values.shape)}: pass values.flatten()"
            )
            raise ConfigError(msg)
        self.table = table
        self._values = values.detach().clone(memory_format=torch.contiguous_format)
        self._pushed = (Expected("grad", values.dtype, tuple(values.shape)),)
        self._updates = 0

    @property
    def values(self) -> torch.Tensor:
        """The live vector, which `apply` may change in place; see `read` for stable values."""
        return self._values

    def check(self, push: Tensors) -> None:
        advice = "Declare the same table on workers and servers"
        check_tensors(self.table, "a push", push, self._pushed, advice)

    def check_query(self, query: Tensors) -> None:
        check_tensors(self.table, "a query", query, [], "Pull the whole shard, without tensors")

    def merge(self, pushes: Sequence[Tensors], scale: float) -> Tensors:
        """Add pushes in the given order, and scale the sum once, in the first push's memory.

        A first push that is not contiguous is copied. See `sum_of`.
        """
        return (sum_of([grad for (grad,) in pushes], scale),)

    @abstractmethod
    def read(self, query: Tensors) -> Tensors:
        """Return the live vector, which later calls of `apply` do not change."""

    def statistics(self) -> dict[str, int]:
        """Return the numbers of updates and of bytes of the values."""
        return {"num_updates": self._updates, "num_bytes": self._values.nbytes}

    def _check_values(self, state: Mapping[str, torch.Tensor]) -> None:
        missing = [name for name in ("values", "updates") if name not in state]
        if missing:
            msg = f"table {self.table!r}: the state lacks {', '.join(missing)}. {ADVICE}"
            raise ConfigError(msg)
        expected = Expected("values", self._values.dtype, tuple(self._values.shape))
        if expected.differs(state["values"]):
            msg = (
                f"table {self.table!r}: the state does not match the table: expected values "
                f"{expected}, got {described(state['values'])}. Split a table's state with the "
                "table's number of shards"
            )
            raise ConfigError(msg)


class DenseStorage(_Vector):
    """A shard of a dense table, stepped by an optimizer.

    A push is `(grad,)`, a query is `()`, and a read returns `(values,)`, of shape [n] each.

    Args:
        values: First values of the shard; copied.
        rule: An elementwise rule, or a function that returns an elementwise torch optimizer, such
            as `partial(torch.optim.SGD, lr=0.1)`.
        table: Name of the table, for messages.

    Shape:
        values: [n], of any floating dtype. Rules step half precision in float32; torch optimizers
        step in the dtype of the values.

    Raises:
        ConfigError: The values are not a floating-point vector, or the optimizer needs a whole
            parameter.
    """

    def __init__(
        self,
        values: torch.Tensor,
        rule: Rule | MakeOptimizer,
        *,
        table: str,
    ) -> None:
        super().__init__(values, table)
        self._stepper = stepper_of(table, self._values, rule)
        self._lent = False

    def apply(self, update: Tensors) -> None:
        """Take one step; copy the vector first if it was read since the last step."""
        (grad,) = update
        if self._lent:
            self._values = self._values.clone()
            self._lent = False
        self._stepper.step(self._values, grad)
        self._updates += 1

    def read(self, query: Tensors) -> Tensors:  # noqa: ARG002 - empty
        """Return the live vector; the next `apply` steps a copy of it instead.

        Cost: nothing here; the next `apply` copies the shard once, for any number of reads.
        """
        self._lent = True
        return (self._values,)

    def export(self) -> State:
        """Return a copy of the whole state by name; see `Storage.export`."""
        updates = torch.tensor(self._updates)
        return {"values": self._values.clone(), "updates": updates, **self._stepper.export()}

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the whole state by a copy of `state`; see `Storage.load`."""
        self._check_values(state)
        rest = {name: value for name, value in state.items() if name not in {"values", "updates"}}
        self._stepper.check(rest)
        self._stepper.load(rest)
        self._values = state["values"].detach().clone(memory_format=torch.contiguous_format)
        self._updates = int(state["updates"])
        self._lent = False

    @property
    def lr(self) -> float:
        """Learning rate; see `Storage.lr`."""
        return self._stepper.lr

    def set_lr(self, lr: float) -> None:
        """Change the learning rate; see `Storage.set_lr`."""
        self._stepper.set_lr(lr)

    def check_lr(self, lr: float) -> None:
        """Check a learning rate; see `Storage.check_lr`."""
        self._stepper.check_lr(lr)


class SumStorage(_Vector):
    """A shard whose values are the merged pushes of the last clock, without an optimizer.

    A push is `(grad,)`, a query is `()`, and a read returns `(sum,)`, of shape [n] each. Workers
    run the optimizer.

    Args:
        values: Values before the first update; copied.
        table: Name of the table, for messages.

    Raises:
        ConfigError: The values are not a floating-point vector.
    """

    def __init__(self, values: torch.Tensor, *, table: str) -> None:
        super().__init__(values, table)

    def apply(self, update: Tensors) -> None:
        """Replace the values by the update, without a copy."""
        (self._values,) = update
        self._updates += 1

    def read(self, query: Tensors) -> Tensors:  # noqa: ARG002 - empty
        """Return the last update, which is never written to."""
        return (self._values,)

    def export(self) -> State:
        """Return a copy of the whole state by name; see `Storage.export`."""
        return {"values": self._values.clone(), "updates": torch.tensor(self._updates)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the whole state by a copy of `state`; see `Storage.load`."""
        unknown = sorted(set(state) - {"values", "updates"})
        if unknown:
            msg = f"table {self.table!r}: the state has the unknown {', '.join(unknown)}. {ADVICE}"
            raise ConfigError(msg)
        self._check_values(state)
        self._values = state["values"].detach().clone(memory_format=torch.contiguous_format)
        self._updates = int(state["updates"])
